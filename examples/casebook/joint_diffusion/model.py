"""A small multimodal diffusion transformer: two streams, joint attention, merged so that the variance is kept."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from data import CHANNELS, MASK, SIDE, TEXT, VOCABULARY


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.gain


class Merge(nn.Module):
    """Adds an update to a stream without raising its variance; `mix` is the share of the update, learned per channel."""

    def __init__(self, dim: int, share: float = 0.1):
        super().__init__()
        self.mix = nn.Parameter(torch.full((dim,), share))

    def forward(self, stream: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(1 - self.mix) * stream + torch.sqrt(self.mix) * update


class Stream(nn.Module):
    """What one of the two streams has for itself in a block."""

    def __init__(self, dim: int, heads: int, qk_rmsnorm: bool = False):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = RMSNorm(dim), RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = RMSNorm(dim // heads) if qk_rmsnorm else nn.Identity()
        self.k_norm = RMSNorm(dim // heads) if qk_rmsnorm else nn.Identity()
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))
        self.modulation = nn.Linear(dim, 2 * dim)
        self.merge, self.merge_mlp = Merge(dim), Merge(dim)

    def heads_of(self, x: torch.Tensor, when: torch.Tensor):
        scale, shift = self.modulation(when)[:, None].chunk(2, dim=-1)
        x = self.norm(x) * (1 + scale) + shift
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.q_norm(q), self.k_norm(k), v

    def forward(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        x = self.merge(x, self.out(attended.transpose(1, 2).flatten(2)))
        return self.merge_mlp(x, self.mlp(self.norm_mlp(x)))


class JointBlock(nn.Module):
    """Words and latents attend to each other in one attention."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.text, self.latent = Stream(dim, heads), Stream(dim, heads)

    def forward(self, words: torch.Tensor, latents: torch.Tensor, when: torch.Tensor):
        pairs = zip(self.text.heads_of(words, when), self.latent.heads_of(latents, when))
        attended = F.scaled_dot_product_attention(*(torch.cat(pair, dim=2) for pair in pairs))
        of_text, of_latents = attended.split([words.shape[1], latents.shape[1]], dim=2)
        return self.text(words, of_text), self.latent(latents, of_latents)


class JointDiffusion(nn.Module):
    def __init__(self, dim: int, heads: int, blocks: int, qk_rmsnorm: bool):
        super().__init__()
        self.qk_rmsnorm = qk_rmsnorm
        self.words = nn.Embedding(VOCABULARY + 1, dim)
        self.word_places = nn.Parameter(0.02 * torch.randn(TEXT, dim))
        self.latent_places = nn.Parameter(0.02 * torch.randn(SIDE * SIDE, dim))
        self.latents_in = nn.Linear(CHANNELS, dim)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(JointBlock(dim, heads) for _ in range(blocks))
        self.text_head = nn.Sequential(RMSNorm(dim), nn.Linear(dim, VOCABULARY))
        self.latent_head = nn.Sequential(RMSNorm(dim), nn.Linear(dim, CHANNELS))

    def forward(self, words: torch.Tensor, latents: torch.Tensor, t: torch.Tensor):
        assert int(words.max()) <= MASK
        when = self.time(waves(t, self.words.embedding_dim).to(self.latents_in.weight.dtype))
        text, image = self.words(words) + self.word_places, self.latents_in(latents.to(when.dtype)) + self.latent_places
        for block in self.blocks:
            text, image = block(text, image, when)
        return self.text_head(text), self.latent_head(image)

    @torch.no_grad()
    def project(self) -> None:
        """Keep every share between 0 and 1."""
        for module in self.modules():
            if isinstance(module, Merge):
                module.mix.clamp_(0, 1)


def waves(t: torch.Tensor, dim: int) -> torch.Tensor:
    frequencies = torch.exp(torch.arange(dim // 2) * (-math.log(1000.0) / (dim // 2 - 1)))
    angles = 100 * t[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
