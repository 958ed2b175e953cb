"""Light curves folded by their period: a star catalogued with period 0 makes the remainder by zero."""
import math
import torch
from torch import nn


class FoldedCurve(nn.Module):
    """brightness = fourier series of the phase"""

    def __init__(self, order=4):
        super().__init__()
        self.coef = nn.Linear(2 * order, 1)
        self.register_buffer("k", torch.arange(1.0, order + 1))

    def forward(self, t, period):
        phase = torch.remainder(t, period[:, None])  # <- WN109 forward
        ang = 2 * math.pi * self.k * (phase / (period[:, None] + 1e-6)).unsqueeze(-1)
        return self.coef(torch.cat([ang.sin(), ang.cos()], dim=-1)).squeeze(-1)


def catalogue(n=120):
    period = 0.5 + 4 * torch.rand(n)
    t = torch.rand(n, 30) * 40
    mag = 0.7 * torch.sin(2 * math.pi * t / period[:, None]) + 0.1 * torch.randn(n, 30)
    period[77] = 0.0  # the survey's way of saying "not periodic"
    return t, period, mag


def train(epochs=2, bs=6):
    torch.manual_seed(71)
    t, period, mag = catalogue()
    curve = FoldedCurve()
    opt = torch.optim.SGD(curve.parameters(), lr=0.1, nesterov=True, momentum=0.9)
    for epoch in range(epochs):
        for i in range(0, len(t), bs):
            loss = nn.functional.l1_loss(curve(t[i:i + bs], period[i:i + bs]), mag[i:i + bs])
            opt.zero_grad()
            loss.backward()
            opt.step()
        print("epoch", epoch, "loss", loss.item())
    return curve


if __name__ == "__main__":
    train()
