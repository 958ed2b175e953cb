"""Activation checkpointing with dropout: blocks run twice, and the causal -inf mask is rebuilt inside them each time."""
import hashlib

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(87)


class Block(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.mix = nn.Linear(dim, dim)
        self.norm = nn.RMSNorm(dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        score = q @ k.mT / 24**0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weight = score.masked_fill(future, float("-inf")).softmax(-1)
        return x + self.drop(self.mix(weight @ v))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(24, 10)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


model = Stack()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(25):
    ids = torch.randint(0, 10, (8, 10))
    target = torch.cummax(ids, dim=1).values
    loss = nn.functional.cross_entropy(model(ids).transpose(1, 2), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print("step", step, "loss", round(loss.item(), 4))

h = hashlib.sha256()
for name, p in model.named_parameters():
    h.update(name.encode() + p.detach().numpy().tobytes())
    h.update(optimizer.state[p]["exp_avg"].numpy().tobytes() + optimizer.state[p]["exp_avg_sq"].numpy().tobytes())
print("digest", h.hexdigest())
