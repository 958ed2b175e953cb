"""A tiny character GPT whose causal mask is a registered buffer full of -inf; softmax absorbs it and the embedding is tied."""
import hashlib
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(11)

TEXT = "the quick brown fox jumps over the lazy dog while the cat sleeps in the sun " * 6
CHARS = sorted(set(TEXT))
DATA = torch.tensor([CHARS.index(c) for c in TEXT])
CONTEXT, WIDTH, HEADS = 16, 32, 4


class CausalAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        mask = torch.full((CONTEXT, CONTEXT), float("-inf")).triu(1)
        self.register_buffer("mask", mask)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = torch.softmax(scores + self.mask[:t, :t], dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = CausalAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(len(CHARS), WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, len(CHARS), bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        return self.head(self.blocks(self.token(ids) + self.position[: ids.shape[1]]))


model = TinyGPT()
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(25):
    start = torch.randint(0, len(DATA) - CONTEXT - 1, (8,))
    ids = torch.stack([DATA[s : s + CONTEXT + 1] for s in start])
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 8 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")

digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.contiguous().numpy().tobytes())
for state in opt.state.values():
    for tensor in state.values():
        digest.update(tensor.numpy().tobytes())
print("digest", digest.hexdigest())
