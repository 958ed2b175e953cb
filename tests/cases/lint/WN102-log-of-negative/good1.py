import torch
import torch.nn.functional as F
from torch import nn


class Rate(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 1)
    def forward(self, x):
        return torch.log(F.softplus(self.head(x)) + 1e-6)
