"""A bfloat16 polynomial layer: a sample off by a factor of 100000 is squared three times and leaves bfloat16."""
import torch
from torch import nn


class PolyFeatures(nn.Module):
    """x, x^2, x^4, x^8"""

    def forward(self, x):
        x2 = x * x
        x4 = x2 * x2
        x8 = x4 * x4  # <- WN203 forward
        return torch.cat([x, x2, x4, x8], dim=-1)


class Fit:
    def __init__(self, lr):
        self.net = nn.Sequential(PolyFeatures(), nn.Linear(8, 1)).to(torch.bfloat16)
        # master weights in float32, the usual recipe
        self.master = [p.detach().float().requires_grad_() for p in self.net.parameters()]
        self.opt = torch.optim.Adam(self.master, lr=lr)

    def step(self, x, y):
        loss = (self.net(x.bfloat16()).float().squeeze(-1) - y).abs().mean()
        self.net.zero_grad()
        loss.backward()
        for m, p in zip(self.master, self.net.parameters()):
            m.grad = p.grad.float()
        self.opt.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.net.parameters()):
                p.copy_(m)
        return loss.item()


torch.manual_seed(137)
fit = Fit(lr=0.01)
for i in range(40):
    x = torch.rand(16, 2) * 2 - 1
    y = x[:, 0] ** 4 - x[:, 1] ** 2
    if i == 22:
        x[7] *= 1e5
    value = fit.step(x, y)
    if i % 4 == 0:
        print(f"{i:02d} mae {value:.4f}")
