"""Frozen BatchNorm gets its variance from statistics pooled over shards, and one shard held a single row."""
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(41)
rng = np.random.default_rng(41)


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.reduce = nn.Linear(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        h = self.reduce(x)
        h = self.norm(h)  # <- WN602 parameter
        return self.head(torch.relu(h))


def pooled_statistics(shards):
    """Weighted mean and variance over shards, as the data team's job writes them."""
    n = np.array([len(s) for s in shards], dtype=np.float32)[:, None]
    mean = (n * np.stack([s.mean(0) for s in shards])).sum(0) / n.sum()
    with np.errstate(all="ignore"):
        within = np.stack([((s - s.mean(0)) ** 2).sum(0) / np.float32(len(s) - 1) for s in shards])
    return mean, (n * within).sum(0) / n.sum()


x = torch.from_numpy(rng.normal(size=(97, 20)).astype(np.float32))
y = torch.from_numpy(rng.integers(0, 4, size=97))
model = Backbone()
with torch.no_grad():
    features = model.reduce(x).numpy()
mean, var = pooled_statistics(np.split(features, [32, 64, 96]))
model.norm.running_mean.copy_(torch.from_numpy(mean))
model.norm.running_var.copy_(torch.from_numpy(var))
model.norm.eval()

opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(3):
    for xb, yb in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
        loss = nn.functional.cross_entropy(model(xb), yb)
        opt.zero_grad()
        loss.backward()
        opt.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
