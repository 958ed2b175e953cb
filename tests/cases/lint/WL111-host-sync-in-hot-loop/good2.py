import torch
from torch import nn


class Block(nn.Module):
    def forward(self, x):
        assert x.dim() == 3
        return x
