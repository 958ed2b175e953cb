import torch
from torch import nn


class Mix(nn.Module):
    def forward(self, x):
        m = x.exp()
        for _ in range(self.iters):
            m = m / torch.sum(m, 1, keepdim=True)  # expect: WL116
            m = m / torch.sum(m, 2, keepdim=True)
        return m
