import torch
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean()  # expect: WL110
        return x - self.mean
