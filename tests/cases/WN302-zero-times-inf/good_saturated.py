"""Multi-label head with binary_cross_entropy, which bounds the logarithm."""
import torch
from torch import nn


def bce(p, y):
    return nn.functional.binary_cross_entropy(p, y)


torch.manual_seed(17)
model = nn.Sequential(nn.Linear(12, 6), nn.Sigmoid())
opt = torch.optim.NAdam(model.parameters(), lr=1e-3)
for step in range(10):
    x = torch.randn(16, 12)
    y = (x[:, :6] > 0).float()
    if step == 6:
        x[3] = 300 * x[3]
        y[3] = (model(x)[3] > 0.5).float()
    loss = bce(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
