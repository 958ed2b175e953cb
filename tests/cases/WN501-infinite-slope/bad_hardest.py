"""Metric learning with the hardest pairs of a batch: every row has the distance 0 to itself, and no pair that is picked is one of these."""
import torch
from torch import nn


def distances(a):
    squares = a.square().sum(1)
    return (squares[:, None] + squares[None, :] - 2 * a @ a.T).clamp_min(0).sqrt()  # <- WN501 backward


def hardest(distance, same, margin=0.2):
    furthest = (distance * same).amax(1)
    nearest = (distance + 1e3 * same).amin(1)
    return (furthest - nearest + margin).relu().mean()


def shoes(count, generator):
    """Four pictures of each of eight pairs of shoes."""
    kinds = torch.randn(8, 12, generator=generator)
    who = torch.arange(8).repeat_interleave(4)
    for _ in range(count):
        yield kinds[who] + 0.3 * torch.randn(32, 12, generator=generator), who


torch.manual_seed(4)
encoder = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 6))
optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-3)
for number, (pictures, who) in enumerate(shoes(24, torch.Generator().manual_seed(5))):
    optimizer.zero_grad()
    loss = hardest(distances(encoder(pictures)), who[:, None] == who[None, :])
    loss.backward()
    optimizer.step()
    if number % 8 == 7:
        print(f"batch {number} loss {loss.item():.4f}")
