"""Geolocation through the Mercator map: near the pole tanh(y) rounds to 1, and asin has an infinite slope there."""
import math

import torch
from torch import nn


class Geolocator(nn.Module):
    """A photo embedding becomes a point on the Mercator map, then longitude and latitude."""

    def __init__(self, features=12):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(features, 32), nn.ELU())
        self.map_x = nn.Linear(32, 1)
        self.map_y = nn.Linear(32, 1)

    def forward(self, z):
        h = self.trunk(z)
        longitude = math.pi * torch.tanh(self.map_x(h))
        latitude = torch.asin(torch.tanh(self.map_y(h)))  # <- WN501 backward
        return torch.cat([longitude, latitude], dim=1)


def photos(n, gen):
    place = torch.rand(n, 2, generator=gen) * 2 - 1
    place[:, 1] = place[:, 1].abs() ** 0.05 * place[:, 1].sign()  # an album of polar expeditions
    mixing = torch.linspace(-2, 2, 24).view(2, 12).cos()
    return place @ mixing * 4, place * torch.tensor([math.pi, math.pi / 2])


def fit(epochs=12, lr=0.05):
    torch.manual_seed(23)
    gen = torch.Generator().manual_seed(24)
    z, target = photos(512, gen)
    net = Geolocator()
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.95)
    for epoch in range(epochs):
        order = torch.randperm(512, generator=gen)
        for batch in order.split(128):
            loss = nn.functional.l1_loss(net(z[batch]), target[batch])
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        print("epoch", epoch, "error (rad)", f"{loss.item():.4f}")


if __name__ == "__main__":
    fit()
