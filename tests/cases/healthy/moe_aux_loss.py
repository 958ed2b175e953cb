"""A mixture of experts: top-2 routing with -inf for the losers, balance and z losses stashed as attributes on the module."""
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, dim=12, experts=4, top=2):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 24), nn.GELU(), nn.Linear(24, dim)) for _ in range(experts))
        self.top = top
        self.aux_loss = None
        self.load = None

    def forward(self, x):
        logits = self.router(x)
        best, index = logits.topk(self.top, -1)
        gate = torch.full_like(logits, float("-inf")).scatter(-1, index, best).softmax(-1)
        used = (gate > 0).float().mean(0)
        self.aux_loss = len(self.experts) * (used * logits.softmax(-1).mean(0)).sum() + 1e-2 * logits.logsumexp(-1).square().mean()
        self.load = used.detach()
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = (gate[:, i] > 0).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]) * gate[rows, i : i + 1])
        return out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([MoE(), MoE()])
        self.head = nn.Linear(12, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (12,)))
        return self.head(x).squeeze(-1)


torch.manual_seed(123)
model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(30):
    x = torch.randn(40, 12)
    y = torch.where(x[:, 0] > 0, x[:, 1], -x[:, 2])
    task = F.mse_loss(model(x), y)
    aux = sum(m.aux_loss for m in model.modules() if isinstance(m, MoE))
    loss = task + 0.02 * aux
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} task {task.item():.4f} aux {aux.item():.4f} load {[round(v, 2) for v in model.layers[0].load.tolist()]}")

sha = hashlib.sha256()
for p in model.parameters():
    for t in (p, *optimizer.state[p].values()):
        sha.update(t.detach().numpy().tobytes())
print("digest", sha.hexdigest())
