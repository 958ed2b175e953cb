"""Multi-label head with the cross-entropy spelled out: a saturated sigmoid is exactly 0 or 1, and right."""
import torch
from torch import nn


def bce(p, y):
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # <- WN302 loss


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
