"""A plate recogniser: convolutions with manifold-constrained hyper-connections, a transformer encoder, letters per column."""

import torch
import torch.nn.functional as F
from torch import nn

from data import HEIGHT, LETTERS


def rms_norm(x: torch.Tensor, eps: float = 1e-20) -> torch.Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + eps)


def sinkhorn(logits: torch.Tensor, rounds: int = 8) -> torch.Tensor:
    """Return matrices whose rows and columns sum to 1."""
    matrix = torch.exp(logits)
    for _ in range(rounds):
        matrix = matrix / matrix.sum(dim=-1, keepdim=True)
        matrix = matrix / matrix.sum(dim=-2, keepdim=True)
    return matrix


class HyperBlock(nn.Module):
    """A sublayer that reads from n residual streams, writes to all of them, and lets them mix."""

    def __init__(self, streams: int, channels: int):
        super().__init__()
        self.streams = streams
        self.layer = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.read = nn.Linear(streams * channels, streams)
        self.write = nn.Linear(streams * channels, streams)
        self.mix = nn.Linear(streams * channels, streams * streams)
        self.alpha = nn.Parameter(torch.full((3,), 0.1))
        with torch.no_grad():
            self.mix.bias.copy_(10 * torch.eye(streams).flatten())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = rms_norm(x.mean(dim=(-2, -1)).flatten(1))
        read = torch.sigmoid(F.linear(pooled, self.alpha[0] * self.read.weight, self.read.bias))
        write = 2 * torch.sigmoid(F.linear(pooled, self.alpha[1] * self.write.weight, self.write.bias))
        logits = F.linear(pooled, self.alpha[2] * self.mix.weight, self.mix.bias)
        mix = sinkhorn(logits.unflatten(-1, (self.streams, self.streams)))
        inner = self.layer(torch.einsum("bn,bnchw->bchw", read, x))
        return torch.einsum("bmn,bnchw->bmchw", mix, x) + write[:, :, None, None, None] * inner[:, None]


class PlateReader(nn.Module):
    def __init__(self, streams: int = 4, channels: int = 16, blocks: int = 2, dim: int = 48):
        super().__init__()
        self.streams = streams
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks = nn.Sequential(*(HyperBlock(streams, channels) for _ in range(blocks)))
        self.columns = nn.Linear(channels * HEIGHT // 2, dim)
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(dim, len(LETTERS) + 1)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.stem(pictures)[:, None].expand(-1, self.streams, -1, -1, -1)
        x = self.blocks(x).mean(dim=1)
        return self.head(self.encoder(self.columns(x.permute(0, 3, 1, 2).flatten(2))))
