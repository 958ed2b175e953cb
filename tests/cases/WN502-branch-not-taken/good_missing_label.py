"""Multi-task regression with missing labels stored as NaN: they are replaced before the difference."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def masked_mse(pred, target):
    missing = torch.isnan(target)
    err = (pred - torch.where(missing, pred.detach(), target)) ** 2
    return err.sum() / (~missing).sum()


torch.manual_seed(36)
x = torch.randn(80, 5)
y = x @ torch.randn(5, 3)
y[44, 1] = float("nan")
net = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))
opt = torch.optim.Adam(net.parameters(), lr=1e-2)
for xb, yb in DataLoader(TensorDataset(x, y), batch_size=8):
    loss = masked_mse(net(xb), yb)
    opt.zero_grad()
    loss.backward()
    opt.step()
