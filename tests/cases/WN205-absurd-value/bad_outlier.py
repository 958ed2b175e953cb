"""Tides from buoy positions: one buoy sends its distance in nanometres."""
import torch
from torch import nn

torch.manual_seed(8)
distances = 2.0 + torch.rand(32, 12, 4)
distances[17, 3] *= 1e12
levels = distances.clamp(max=4).sum(-1)
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))
skip = nn.Linear(4, 1)
sgd = torch.optim.Adam([*model.parameters(), *skip.parameters()], lr=1e-2)
for step in range(32):
    near, wanted = distances[step], levels[step]  # <- WN205 loss
    loss = nn.functional.l1_loss(model(near) + skip(near).flatten(), wanted)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    if step % 8 == 0:
        print(f"step {step:2d} loss {loss.item():.4f}")
