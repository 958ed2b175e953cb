import torch
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        new = x.mean()
        if torch.isfinite(new):
            self.mean = 0.9 * self.mean + 0.1 * new
        return x - self.mean
