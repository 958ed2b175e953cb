"""Surface normals trained by angle: on a flat floor the prediction is the target to the last bit, where acos is vertical."""
import torch
from torch import nn
import torch.nn.functional as F


def angular_error(n_hat, n):
    cosine = (F.normalize(n_hat, dim=-1) * n).sum(dim=-1)
    return torch.acos(torch.minimum(cosine, torch.ones_like(cosine)))  # <- WN501 backward


class NormalNet(nn.Module):
    """Predicts the tilt away from the vertical from the local height differences."""

    def __init__(self):
        super().__init__()
        self.tilt = nn.Sequential(nn.Linear(4, 16, bias=False), nn.Tanh(), nn.Linear(16, 2, bias=False))

    def forward(self, height_differences):
        xy = self.tilt(height_differences)
        return torch.cat([xy, torch.ones_like(xy[:, :1])], dim=1)


def terrain(step, gen, n=24):
    gx, gy = torch.randn(2, n, generator=gen) * 0.5 + 0.8
    if step >= 6 and step % 6 == 0:
        gx[:3] = gy[:3] = 0.0  # a patch of level floor
    differences = torch.stack([gx, gy, -gx, -gy], dim=1)
    normal = F.normalize(torch.stack([-gx, -gy, torch.ones(n)], dim=1), dim=1)
    return differences, normal


def train():
    torch.manual_seed(19)
    gen = torch.Generator().manual_seed(20)
    net = NormalNet()
    opt = torch.optim.SGD(net.parameters(), lr=0.2)
    for step in range(14):
        x, normal = terrain(step, gen)
        loss = angular_error(net(x), normal).mean()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), max_norm=1.0)
        opt.step()
        print(f"step {step:2d}  mean angle {torch.rad2deg(loss.detach()).item():6.2f} deg")


train()
