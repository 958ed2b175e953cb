import torch
from torch import nn


class Rate(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        return torch.log(self.head(x))  # expect: WN102
