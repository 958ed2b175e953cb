import torch
from torch import nn


class Once(nn.Module):
    def forward(self, x):
        return x @ self.w
