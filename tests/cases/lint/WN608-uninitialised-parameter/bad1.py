import torch
from torch import nn


class Bilinear(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.core = nn.Parameter(torch.empty(n, n))  # expect: WN608
    def forward(self, x):
        return x @ self.core
