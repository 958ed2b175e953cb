import torch
from torch import nn


class Rec(nn.Module):
    def forward(self, x):
        return self.gru(x)[0]
