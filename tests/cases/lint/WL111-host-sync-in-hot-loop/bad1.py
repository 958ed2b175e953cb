import torch
from torch import nn


class Block(nn.Module):
    def forward(self, x):
        assert not torch.isnan(x).any()  # expect: WL111
        return x
