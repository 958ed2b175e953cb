import torch
from torch import nn


class Bilinear(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.core = nn.Parameter(torch.zeros(n, n))
