import math
import torch
from torch import nn


class A(nn.Module):
    def forward(self, attn):
        if (attn == -math.inf).all() and self.training:  # expect: WL114
            attn = torch.zeros_like(attn)
        return attn.softmax(-1)
