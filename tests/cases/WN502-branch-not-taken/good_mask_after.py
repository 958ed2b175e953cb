"""Contacts between particles, self-pairs get distance 1 under the root before they are multiplied away."""
import torch
import torch.nn as nn


class SpringLaw(nn.Module):
    """Pair energy as a function of distance."""

    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, distance):
        return self.f(distance.unsqueeze(-1)).squeeze(-1)


class MovedParticles(nn.Module):
    """Predicts displacements, then the energy of the displaced configuration."""

    def __init__(self, n):
        super().__init__()
        self.shift = nn.Linear(2, 2)
        self.law = SpringLaw()
        self.register_buffer("other", 1.0 - torch.eye(n))
        self.use_all_pairs = False

    def forward(self, x):
        x = x + 0.1 * self.shift(x)
        if not self.use_all_pairs:
            return self.law((x[1:] - x[:-1]).norm(dim=-1)).sum()
        squared = (x[:, None] - x[None, :]).square().sum(dim=-1)
        distance = torch.sqrt(squared + (1.0 - self.other)) * self.other
        return (self.law(distance) * self.other).sum() / 2


def main():
    torch.manual_seed(55)
    n = 8
    model = MovedParticles(n)
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    for step in range(30):
        model.use_all_pairs = step >= 12  # first the chain, then all pairs
        x = torch.randn(n, 2)
        i, j = torch.triu_indices(n, n, offset=1)
        pairs = (x[i] - x[j]).norm(dim=-1) if model.use_all_pairs else (x[1:] - x[:-1]).norm(dim=-1)
        energy = (0.1 * (pairs - 1.0) ** 2).sum()
        loss = (model(x) - energy) ** 2 / n
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 4 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
