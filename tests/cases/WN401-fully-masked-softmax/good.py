"""A small ticket classifier with hand-written attention: an empty ticket attends to nothing and gets zeros."""
import math

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)

PAD, VOCAB, WIDTH, HEADS = 0, 60, 32, 4


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, key_is_real):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(c // self.heads)
        nothing = ~key_is_real.any(dim=1)[:, None, None, None]
        hidden = ~key_is_real[:, None, None, :] & ~nothing
        scores = scores.masked_fill(hidden, float("-inf"))
        attn = F.softmax(scores, dim=-1).masked_fill(nothing, 0.0)
        y = (attn @ v).transpose(1, 2).reshape(b, t, c)
        return self.out(y)


class TicketClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.attn = SelfAttention(WIDTH, HEADS)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attn(self.norm(x), ids != PAD)
        return self.head(x.mean(dim=1))


def fetch_batch(step, size=16, length=12):
    ids = torch.randint(1, VOCAB, (size, length))
    lengths = torch.randint(2, length + 1, (size,))
    if step == 9:
        lengths[5] = 0  # somebody pressed "send" without typing
    ids[torch.arange(length)[None, :] >= lengths[:, None]] = PAD
    return ids, ids.sum(dim=1) % 3


model = TicketClassifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(16):
    ids, label = fetch_batch(step)
    loss = F.cross_entropy(model(ids), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
