import torch
from torch import nn


class Rec(nn.Module):
    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x
