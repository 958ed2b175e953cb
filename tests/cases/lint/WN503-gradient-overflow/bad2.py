import torch
from torch import nn


class Rec(nn.Module):
    def forward(self, x):
        state = x[0]
        for step in x:
            state = state @ self.rec + step  # expect: WN503
        return state
