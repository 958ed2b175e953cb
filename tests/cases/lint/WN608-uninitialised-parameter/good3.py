import torch
from torch import nn


class Reset(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.w = nn.Parameter(torch.empty(n))
        self.reset_parameters()
    def reset_parameters(self):
        self.w.data.uniform_(-1, 1)
