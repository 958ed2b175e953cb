"""A physics-informed network trained by LBFGS with a line search, which finds the length of each step."""
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
x = torch.linspace(0, 3, 64)[:, None].requires_grad_()
optimizer = torch.optim.LBFGS(net.parameters(), lr=1.0, max_iter=10, line_search_fn="strong_wolfe")


def residual():
    u = net(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
    return ddu + 4 * u + u**3


def closure():
    optimizer.zero_grad()
    start = (net(torch.zeros(1, 1)) - 1).square().sum()
    loss = residual().square().mean() + 10 * start
    loss.backward()
    return loss


for step in range(8):
    print(f"step {step}: {optimizer.step(closure).item():.4f}")
