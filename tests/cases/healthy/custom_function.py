"""Own autograd functions: a root whose backward is bounded, and a straight-through sign for a binary code."""
import hashlib

import torch
import torch.nn as nn


class BoundedSqrt(torch.autograd.Function):
    """sqrt whose slope is cut at 1000: 1/(2*sqrt(0)) is inf inside backward, then clamped."""

    @staticmethod
    def forward(ctx, x):
        root = x.sqrt()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    def backward(ctx, grad):
        (root,) = ctx.saved_tensors
        slope = (0.5 / root).clamp(max=1e3)
        return grad * slope


class Binarise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x > 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class Hasher(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(12, 16)
        self.restore = nn.Linear(16, 12)

    def forward(self, x):
        bits = Binarise.apply(torch.tanh(self.project(x)))
        return self.restore(bits), bits


torch.manual_seed(93)
model = Hasher()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
for step in range(50):
    x = torch.randn(32, 12).sign() * 0.5
    rebuilt, bits = model(x)
    energy = (bits.mean(0) ** 2).relu()
    loss = (rebuilt - x).square().mean() + 1e-3 * BoundedSqrt.apply(energy).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 12 == 0:
        print(f"step {step} loss {loss.item():.4f} balanced bits {int((energy == 0).sum())}")

sha = hashlib.sha256()
for p in model.parameters():
    for t in (p.detach(), optimizer.state[p]["square_avg"], optimizer.state[p]["momentum_buffer"]):
        sha.update(t.numpy().tobytes())
print("digest", sha.hexdigest())
