"""Metric learning with identical pairs: the norm of a zero difference and F.normalize of a zero vector both have slope 0."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(75)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(6, 24, bias=False), nn.ReLU(), nn.Linear(24, 8, bias=False))

    def forward(self, a, b):
        za, zb = self.tower(a), self.tower(b)
        gap = torch.linalg.vector_norm(za - zb, dim=-1)
        cosine = (F.normalize(za, dim=-1) * F.normalize(zb, dim=-1)).sum(-1)
        return gap, cosine


net = Siamese()
optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
for step in range(40):
    a = torch.randn(24, 6)
    b = torch.where(torch.arange(24)[:, None] % 2 == 0, a + 0.05 * torch.randn(24, 6), torch.randn(24, 6))
    b[0] = a[0]
    a[1], b[1] = 0.0, 0.0
    same = (torch.arange(24) % 2 == 0).float()
    gap, cosine = net(a, b)
    contrastive = same * gap.square() + (1 - same) * F.relu(1 - gap).square()
    loss = (contrastive + 0.1 * same * (1 - cosine)).mean() + 1e-3 * gap.norm() + 1e-4 * (a[1] @ net.tower[0].weight.T).norm()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.5f} smallest gap {gap.min().item():.3g}")

h = hashlib.sha256()
for p in net.parameters():
    h.update(p.detach().numpy().tobytes())
    for v in optimizer.state[p].values():
        h.update(v.numpy().tobytes())
print("digest", h.hexdigest())
