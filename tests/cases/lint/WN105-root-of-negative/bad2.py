import torch
from torch import nn


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 1)
    def forward(self, x):
        return self.out(x).sqrt()  # expect: WN105
