import torch
from torch import nn


class Attention(nn.Module):
    def forward(self, scores, empty):
        return torch.where(empty, 0.0, torch.softmax(torch.where(empty, 0.0, scores), -1))
