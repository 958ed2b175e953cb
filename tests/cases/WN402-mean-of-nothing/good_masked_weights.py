"""Attention pooling over a set, masked by multiplication and renormalised in place: an empty set keeps weights of 0."""
import torch
from torch import nn


class AttentionPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 6))
        self.value, self.out = nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, items, present):
        value = self.value(items)
        score = (value * self.query).sum(dim=-1)
        weight = torch.exp(score - score.max(dim=1, keepdim=True).values)
        weight = weight * present
        weight /= weight.sum(dim=1, keepdim=True).clamp_min(1e-6)
        return self.out((weight[..., None] * value).sum(dim=1)).squeeze(1)


def baskets(gen, n=8, most=5):
    while True:
        count = torch.randint(1, most + 1, (n, 1), generator=gen)
        yield torch.randn(n, most, 3, generator=gen), torch.arange(most)[None] < count


torch.manual_seed(70)
pool = AttentionPool()
opt = torch.optim.Adam(pool.parameters(), lr=1e-2)
for step, (items, present) in zip(range(18), baskets(torch.Generator().manual_seed(71))):
    if step == 11:
        present[4] = False  # a basket whose items were all taken back
    price = items[..., 0].sum(dim=1)
    loss = (pool(items, present) - price).abs().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 3 == 0:
        print(f"step {step:2d}: {loss.item():.4f}")
