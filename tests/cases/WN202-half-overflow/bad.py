"""A float16 attention layer that scales after the product: the raw scores q.k pass 65504."""
import math
import torch
from torch import nn


class HalfAttention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.dim = dim

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-2, -1)  # <- WN202 forward
        att = torch.softmax(scores / math.sqrt(self.dim), dim=-1)
        return att @ v


class Model(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.inp = nn.Linear(8, dim)
        self.attn = HalfAttention(dim)
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        return self.out(self.attn(self.inp(x)).mean(dim=1)).squeeze(-1)


torch.manual_seed(101)
model = Model().half()
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(25):
    seq = torch.randn(6, 10, 8)
    if step == 14:
        seq[2, 3:7] *= 600.0  # a spike in the recording
    target = seq.clamp(-3, 3).mean(dim=(1, 2))
    pred = model(seq.half())
    loss = (pred.float() - target).square().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 3 == 0 or step == 14:
        print(f"step {step} loss {loss.item():.5f}")
