"""Meta-learning with a closed-form ridge head: the ridge makes every support set solvable."""
import torch
from torch import nn


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 6), nn.ReLU())

    def forward(self, x):
        return self.net(x)


def closed_form_head(phi, y):
    gram = phi.T @ phi + 1e-2 * torch.eye(phi.shape[1])
    return torch.linalg.solve(gram, phi.T @ y)


class Trainer:
    def __init__(self):
        self.embed = Embed()
        self.opt = torch.optim.Adam(self.embed.parameters(), lr=3e-3)

    def task(self, offset, shots=40):
        w = torch.randn(3, 1)
        x = torch.randn(shots + 10, 3)
        y = (x @ w).sin()
        x = x + offset
        return x[:shots], y[:shots], x[shots:], y[shots:]

    def step(self, offset):
        sx, sy, qx, qy = self.task(offset)
        head = closed_form_head(self.embed(sx), sy)
        loss = (self.embed(qx) @ head - qy).square().mean()
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.embed.parameters(), 0.1)
        self.opt.step()
        return loss.item()


torch.manual_seed(61)
t = Trainer()
with torch.no_grad():  # start with all six features alive
    t.embed.net[2].bias.fill_(1.5)
for n in range(30):
    offset = 0.0 if n != 14 else 25.0  # this task was recorded with another zero point
    print("task", n, "query loss", t.step(offset), flush=True)
