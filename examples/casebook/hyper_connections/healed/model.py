"""A plate recogniser: convolutions with manifold-constrained hyper-connections, a transformer encoder, letters per column."""

import torch
import torch.nn.functional as F
from torch import nn

from data import HEIGHT, LETTERS


def rms_norm(x: torch.Tensor, eps: float = 1e-20) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def sinkhorn(logits: torch.Tensor, rounds: int = 8) -> torch.Tensor:
    """Return matrices whose rows and columns sum to 1."""
    matrix = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    for _ in range(rounds):
        matrix = matrix / matrix.sum(dim=-1, keepdim=True, dtype=torch.float32)
        matrix = matrix / matrix.sum(dim=-2, keepdim=True, dtype=torch.float32)
    return matrix


class HyperBlock(nn.Module):
    """A sublayer that reads from n residual streams, writes to all of them, and lets them mix."""

    def __init__(self, streams: int, channels: int):
        super().__init__()
        self.layer = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.read = nn.Linear(streams * channels, streams)
        self.write = nn.Linear(streams * channels, streams)
        self.alpha = nn.Parameter(torch.full((3,), 0.1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the streams, and the share that each took from the others."""
        pooled = rms_norm(x.mean(dim=(-2, -1)))
        read = torch.sigmoid(F.linear(pooled.flatten(1), self.alpha[0] * self.read.weight, self.read.bias))
        write = 2 * torch.sigmoid(F.linear(pooled.flatten(1), self.alpha[1] * self.write.weight, self.write.bias))
        logits = self.alpha[2] * (pooled @ pooled.mT)
        mix = sinkhorn(logits)
        inner = self.layer(torch.einsum("bn,bnchw->bchw", read, x))
        out = torch.einsum("bmn,bnchw->bmchw", mix, x) + write[:, :, None, None, None] * inner[:, None]
        return out, 1 - mix.diagonal(dim1=-2, dim2=-1).float().mean()


class PlateReader(nn.Module):
    def __init__(self, streams: int = 4, channels: int = 14, blocks: int = 2, dim: int = 48):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.gains = nn.Parameter(0.5 + torch.rand(streams, channels, 1, 1))
        self.blocks = nn.ModuleList(HyperBlock(streams, channels) for _ in range(blocks))
        self.columns = nn.Linear(channels * HEIGHT // 2, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(dim, len(LETTERS) + 1)

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the letters' logits per column, and how much the streams were mixed in all blocks together."""
        x, mixed = self.stem(pictures)[:, None] * self.gains, 0.0
        for block in self.blocks:
            x, share = block(x)
            mixed = mixed + share
        return self.head(self.encoder(self.columns(x.mean(dim=1).permute(0, 3, 1, 2).flatten(2)))), mixed
