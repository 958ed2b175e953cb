"""Camera motion from optical flow by rotation angle: a standing camera gives the identity, trace 3, acos of exactly 1."""
import torch
from torch import nn


def skew(v):
    x, y, z = v.unbind(-1)
    o = torch.zeros_like(x)
    return torch.stack([o, -z, y, z, o, -x, -y, x, o], dim=-1).view(*v.shape[:-1], 3, 3)


def to_rotation(v):
    """Cayley transform: (I - A)^-1 (I + A) with A = skew(v)."""
    eye = torch.eye(3).expand(len(v), 3, 3)
    a = skew(v)
    return torch.linalg.solve(eye - a, eye + a)


def angle_between(r1, r2):
    trace = (r1 * r2).sum(dim=(-2, -1))
    return torch.arccos(torch.minimum((trace - 1) / 2, torch.ones_like(trace)))  # <- WN501 backward


class EgoMotion(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24, bias=False), nn.Tanh(), nn.Linear(24, 3, bias=False))

    def forward(self, flow):
        return to_rotation(0.5 * self.net(flow))


def video(gen, n=16, frames=30, still=()):
    lens = torch.randn(3, 8, generator=gen)
    for frame in range(frames):
        motion = 0.3 * torch.randn(n, 3, generator=gen)
        if frame in still:
            motion[:2] = 0.0  # on the tripod
        yield motion @ lens, to_rotation(motion)


torch.manual_seed(91)
camera = EgoMotion()
opt = torch.optim.Adam(camera.parameters(), lr=5e-3)
for frame, (flow, rotation) in enumerate(video(torch.Generator().manual_seed(90), still=(17, 18))):
    loss = angle_between(camera(flow), rotation).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if frame % 6 == 0:
        print(f"frame {frame:2d}: {loss.item():.4f} rad")
