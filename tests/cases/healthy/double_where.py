"""A PINN for a radial field: sin(r)/r and r*r*log(r) are made safe by the double where, so the unused branch sends nothing back."""
import hashlib

import torch
import torch.nn as nn


def sinc(r):
    near = r.abs() < 1e-4
    safe = torch.where(near, torch.ones_like(r), r)
    return torch.where(near, 1 - r * r / 6, torch.sin(safe) / safe)


def thin_plate(r):
    positive = r > 0
    safe = torch.where(positive, r, torch.ones_like(r))
    return torch.where(positive, safe * safe * torch.log(safe), torch.zeros_like(r))


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
        self.frequency = nn.Parameter(torch.tensor(1.5))
        self.bend = nn.Parameter(torch.tensor(0.05))

    def forward(self, r):
        return self.net(r) + sinc(self.frequency * r) + self.bend * thin_plate(r)


def residual(field, r):
    r = r.requires_grad_()
    u = field(r)
    (du,) = torch.autograd.grad(u.sum(), r, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), r, create_graph=True)
    return r * ddu + 2 * du + r * u


def main():
    torch.manual_seed(64)
    field = Field()
    optimizer = torch.optim.Adam(field.parameters(), lr=3e-3)
    for step in range(50):
        r = torch.rand(64, 1) * 5
        r[:4] = 0.0
        interior = residual(field, r).square().mean()
        centre = (field(torch.zeros(1, 1)) - 1).square().sum()
        loss = interior + centre
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: interior {interior.item():.4f} centre {centre.item():.4f}")
    sha = hashlib.sha256()
    for p in field.parameters():
        for t in [p, *optimizer.state[p].values()]:
            sha.update(t.detach().numpy().tobytes())
    print("digest", sha.hexdigest())


if __name__ == "__main__":
    main()
