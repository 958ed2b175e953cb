import torch
from torch import nn


class Net(nn.Module):
    def forward(self, x):
        p = torch.sigmoid(x)
        return (1 - p).log().mean()  # expect: WN101
