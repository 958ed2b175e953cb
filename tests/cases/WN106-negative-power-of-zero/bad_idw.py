"""Inverse distance weighting of weather stations: a query falls exactly on a station and its distance has no reciprocal."""
import torch


class Interpolator:
    """rain at a place = sum of station values, weighted by 1 / distance^2"""

    def __init__(self, places):
        self.places = places
        self.values = torch.zeros(len(places), requires_grad=True)
        self.power = 2

    def __call__(self, query):
        gap = query[:, None, :] - self.places[None, :, :]
        d = gap.abs().sum(-1)
        w = torch.reciprocal(d ** self.power)  # <- WN106 loss
        w = w / w.sum(dim=1, keepdim=True)
        return w @ self.values


def field(p):
    return torch.sin(p[:, 0]) + torch.cos(p[:, 1])


torch.manual_seed(29)
stations = torch.randint(0, 50, (40, 2)) / 10
model = Interpolator(stations)
opt = torch.optim.Adam([model.values], lr=0.05)

for hour in range(60):
    # positions are reported with a resolution of 0.1
    q = torch.randint(0, 50, (6, 2)) / 10 if hour > 20 else torch.rand(6, 2) * 5
    err = model(q) - field(q)
    loss = (err ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if hour % 6 == 0:
        print(f"hour {hour}: mse {loss.item():.4f}")
