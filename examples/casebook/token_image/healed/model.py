"""A diffusion transformer: patches, RMSNorm, AdaLN-Zero with the time, attention that leaves the padding out."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, valid):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~valid[:, None, None, :], float("-inf"))
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Both halves are scaled, shifted and gated by the time; the gates start at 0."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x, valid, time):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(time))[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1, valid)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class TokenImageDiT(nn.Module):
    """Predicts the noise in an image of tokens."""

    def __init__(self, side=8, patch=2, width=64, heads=4, depth=3, threshold=0.5):
        super().__init__()
        self.patch, self.width, self.threshold = patch, width, threshold
        self.embed = nn.Linear(3 * patch**2, width)
        self.position = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, 3 * patch**2)

    def patches(self, image):
        """[batch, channels, side, side] to [batch, patches, values]."""
        return F.unfold(image, self.patch, stride=self.patch).transpose(1, 2)

    def forward(self, image, mask, time):
        coverage = self.patches(mask[:, None]).mean(-1)
        valid = (coverage > self.threshold) | (coverage == coverage.amax(-1, keepdim=True))  # a patch counts if more than half of it is text
        x = self.embed(self.patches(image)) + self.position
        time = self.time(time_embedding(time, self.width))
        for block in self.blocks:
            x = block(x, valid, time)
        out = self.head(self.norm(x)).transpose(1, 2)
        return F.fold(out, image.shape[-2:], self.patch, stride=self.patch)


def time_embedding(time, width):
    """Cosines and sines of the time at many frequencies."""
    angle = 1000.0 * time[:, None] * torch.exp(-math.log(1e4) * torch.arange(width // 2) / (width // 2))
    return torch.cat([angle.cos(), angle.sin()], -1)
