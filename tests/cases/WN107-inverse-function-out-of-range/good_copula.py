"""Copula model: ranks become Gaussian scores through Normal.icdf, kept inside (0, 1)."""
import torch
from torch import nn
from torch.distributions import Normal

std_normal = Normal(torch.tensor(0.0), torch.tensor(1.0))


def gaussian_scores(u):
    return std_normal.icdf(u.clamp(1e-4, 1 - 1e-4))


def ranks(x):
    r = x.argsort(0).argsort(0).float()
    return r / x.shape[0]


torch.manual_seed(5)
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
opt = torch.optim.Adam(net.parameters())
for t in range(10):
    x = torch.randn(32, 4)
    u = (ranks(x) + 0.5 / 32) if t != 4 else ranks(x)
    z = gaussian_scores(u)
    nll = (net(z) - z).pow(2).mean()
    opt.zero_grad()
    nll.backward()
    opt.step()
