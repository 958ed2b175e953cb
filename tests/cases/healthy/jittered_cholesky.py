"""A Gaussian process whose kernel is singular at first: the failed factorisation is caught and tried again with more jitter."""
import hashlib

import torch
from torch import nn


class Kernel(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return torch.exp(-(x - x.t()).square() / self.scale.exp())


def factor(k):
    jitter = 0.0
    while True:
        try:
            return torch.linalg.cholesky(k + jitter * torch.eye(len(k)))
        except torch.linalg.LinAlgError:
            jitter = max(10 * jitter, 1e-5)


torch.manual_seed(12)
kernel = Kernel()
optimizer = torch.optim.Adam(kernel.parameters(), lr=0.05)
for step in range(20):
    x = torch.rand(8, 1)
    x[1] = x[0]  # the same point measured twice
    chol = factor(kernel(x))
    y = torch.sin(6 * x)
    loss = (y * torch.cholesky_solve(y, chol)).sum() * 1e-3 + chol.diagonal().log().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step}: scale {kernel.scale.item():.4f}")

sha = hashlib.sha256()
for p in kernel.parameters():
    sha.update(p.detach().numpy().tobytes())
print("digest", sha.hexdigest())
