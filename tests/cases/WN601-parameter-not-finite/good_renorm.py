"""Filters are scaled to unit length at start; a pruned filter of length zero stays zero."""
import torch
from torch import nn
import torch.nn.functional as F


class PrunedNet(nn.Module):
    def __init__(self, keep=0.75):
        super().__init__()
        self.conv = nn.Conv1d(2, 12, 5, padding=2)
        self.scale = nn.Parameter(torch.ones(12))
        self.head = nn.Linear(12, 3)
        with torch.no_grad():
            strength = self.conv.weight.flatten(1).norm(dim=1)
            pruned = strength < strength.quantile(1 - keep)
            self.conv.weight[pruned] = 0.0

    @torch.no_grad()
    def unit_filters(self):
        w = self.conv.weight
        w.div_(w.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None])

    def forward(self, signal):
        maps = self.conv(signal)
        maps = F.relu(maps * self.scale[:, None])
        return self.head(maps.amax(-1))


def waves(n, generator):
    kind = torch.randint(0, 3, (n,), generator=generator)
    t = torch.linspace(0, 6.28, 40)
    phase = torch.rand(n, 1, generator=generator) * 6.28
    base = torch.sin((kind[:, None] + 1) * t + phase)
    return torch.stack([base, base.cumsum(1) / 10], 1), kind


def main():
    torch.manual_seed(6)
    generator = torch.Generator().manual_seed(60)
    net = PrunedNet()
    net.unit_filters()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for it in range(20):
        signal, kind = waves(16, generator)
        loss = F.cross_entropy(net(signal), kind)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if it % 5 == 0:
            print(f"it {it:3d}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
