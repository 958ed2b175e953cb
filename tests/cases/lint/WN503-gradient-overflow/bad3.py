import torch
from torch import nn


class Rec(nn.Module):
    def forward(self, x, n):
        for _ in range(n):
            x = x @ self.transition  # expect: WN503
        return x
