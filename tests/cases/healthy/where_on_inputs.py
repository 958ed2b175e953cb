"""Features are made in forward from raw counts: log(0) and 0/0 are computed and then deselected by where; inputs carry no gradient."""
import hashlib

import torch
import torch.nn as nn


class Featurise(nn.Module):
    def forward(self, counts, shown):
        rate = torch.where(shown > 0, counts / shown, torch.zeros_like(counts))
        level = torch.where(counts > 0, torch.log(counts), torch.full_like(counts, -1.0))
        surprise = torch.nan_to_num(counts * torch.log(counts), nan=0.0)
        return torch.stack([rate, level, surprise / 50], dim=-1)


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = Featurise()
        self.mlp = nn.Sequential(nn.Linear(3, 20), nn.Hardswish(), nn.Linear(20, 1))

    def forward(self, counts, shown):
        return self.mlp(self.features(counts, shown)).squeeze(-1)


torch.manual_seed(133)
model = Scorer()
optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
for step in range(50):
    shown = torch.poisson(torch.full((40,), 3.0))
    counts = torch.binomial(shown, torch.full((40,), 0.4))
    target = 0.3 * counts - 0.1 * shown
    loss = nn.functional.huber_loss(model(counts, shown), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f} never shown {int((shown == 0).sum())} no count {int((counts == 0).sum())}")

h = hashlib.sha256()
for p in model.parameters():
    h.update(p.detach().numpy().tobytes())
    for key in ("square_avg", "acc_delta"):
        h.update(optimizer.state[p][key].numpy().tobytes())
print("digest", h.hexdigest())
