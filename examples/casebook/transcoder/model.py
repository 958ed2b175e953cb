"""A masked diffusion language model (frozen, the one we look into) and the sparse transcoder that explains one of its blocks."""

import torch
import torch.nn.functional as F
from torch import nn

from loss import unexplained


class Block(nn.Module):
    """Pre-norm attention over the whole context (a diffusion model has no causal mask) and a gated MLP."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.ff_norm = nn.RMSNorm(width, eps=1e-5)
        self.gate = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, rotation):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.attn_out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.ff_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotary(length, size):
    """Cosines and sines of the rotary position embedding."""
    angle = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, size, 2) / size)
    return angle.cos(), angle.sin()


def rotate(x, rotation):
    cos, sin = (part.to(x.dtype) for part in rotation)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)


class DiffusionLM(nn.Module):
    """Predicts the tokens behind the masks; position enters through the rotary embedding alone."""

    def __init__(self, vocabulary, width=64, heads=4, depth=2, context=64):
        super().__init__()
        self.heads = heads
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary + 1, width),  # the last row is the mask token
                "blocks": nn.ModuleList(Block(width, heads) for _ in range(depth)),
                "ln_f": nn.RMSNorm(width, eps=1e-5),
            }
        )
        self.rotation = rotary(context, width // heads)

    def forward(self, input_ids):
        x = self.transformer["wte"](input_ids)
        for block in self.transformer["blocks"]:
            x = block(x, self.rotation)
        return self.transformer["ln_f"](x) @ self.transformer["wte"].weight.T


class SparseTranscoder(nn.Module):
    """From the input of a block to its output, through k of many latents."""

    def __init__(self, width, latents=512, k=16):
        super().__init__()
        self.k = k
        self.encoder = nn.Linear(width, latents)
        nn.init.zeros_(self.encoder.bias)
        self.W_dec = nn.Parameter(F.normalize(self.encoder.weight.detach().clone(), dim=-1))
        self.b_dec = nn.Parameter(torch.zeros(width))

    def encode(self, x):
        return F.relu(self.encoder(x)).topk(self.k, sorted=False)

    def decode(self, top):
        """Sum the rows of the decoder, each with the weight of its latent."""
        return F.embedding_bag(top.indices, self.W_dec, per_sample_weights=top.values, mode="sum") + self.b_dec

    def forward(self, x, y):
        y_hat = self.decode(self.encode(x.to(self.W_dec.dtype)))
        return unexplained(y, y_hat)
