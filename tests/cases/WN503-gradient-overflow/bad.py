"""A sine network in half precision: the waves stay within [-1, 1], the gradient grows layer by layer past 65504."""
import math

import torch
from torch import nn


class SineNet(nn.Module):
    """SIREN without the small initialisation that its frequency asks for."""

    def __init__(self, depth=9, width=32, omega=22.0):
        super().__init__()
        self.omega = omega
        self.lift = nn.Linear(1, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.read = nn.Linear(width, 1)

    def forward(self, t):
        h = torch.sin(self.lift(t))
        for layer in self.layers:
            h = torch.sin(self.omega * layer(h))  # <- WN503 backward
        return self.read(h)


def main():
    torch.manual_seed(27)
    net = SineNet().half()
    t = torch.linspace(-1, 1, 64).unsqueeze(1).half()
    signal = torch.sin(6 * t) * torch.exp(-t * t)
    lr = 1e-2
    for step in range(20):
        net.omega = 2.0 + 1.0 * step  # sharper and sharper detail
        loss = (net(t) - signal).float().square().mean()
        loss.backward()
        with torch.no_grad():
            norm = math.sqrt(sum(p.grad.float().square().sum().item() for p in net.parameters()))
            for p in net.parameters():
                p -= (lr * p.grad.float() / max(norm, 1.0)).half()
                p.grad = None
        print(f"step {step:2d} omega {net.omega:4.1f} loss {loss.item():.4f} gradient norm {norm:.3g}")


if __name__ == "__main__":
    main()
