"""A home-made loss scaler with a ceiling: the scaled gradient always fits into the half-precision network."""
import torch
from torch import nn

torch.manual_seed(101)


class DoublingScaler:
    """Doubles the loss scale every few steps up to a ceiling."""

    def __init__(self, scale=2.0 ** 12, every=2):
        self.scale, self.every, self.steps = scale, every, 0

    def update(self):
        self.steps += 1
        if self.steps % self.every == 0:
            self.scale = min(self.scale * 2, 2.0 ** 15)


def windows(n):
    t = 10 * torch.rand(n, 1)
    wave = torch.sin(t + torch.arange(6) * 0.3)
    return wave[:, :5].half(), wave[:, 5:]


network = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 1)).half()
master = [p.detach().clone().float().requires_grad_() for p in network.parameters()]
optimizer = torch.optim.SGD(master, lr=0.02, momentum=0.9)
scaler = DoublingScaler()

for step in range(40):
    x, y = windows(32)
    loss = nn.functional.mse_loss(network(x).float(), y, reduction="mean") * scaler.scale
    network.zero_grad()
    loss.backward()
    for full, half in zip(master, network.parameters()):
        full.grad = half.grad.float() / scaler.scale
    optimizer.step()
    with torch.no_grad():
        for full, half in zip(master, network.parameters()):
            half.copy_(full)
    if step % 4 == 0:
        print(f"step {step:2d} scale 2^{scaler.scale.hex().split('p')[1]} loss {loss.item() / scaler.scale:.5f}")
    scaler.update()
