"""A map drawn from travel times, then untangled by a repulsion term: cdist has slope 0 for a town and itself."""
import torch

torch.manual_seed(9)
N = 24
towns = torch.rand(N, 2) * 4
i, j = torch.triu_indices(N, N, offset=1)
hours = (towns[i] - towns[j]).norm(dim=1) * (1 + 0.05 * torch.randn(len(i)))
layout = torch.nn.Parameter(torch.randn(N, 2))


def stress():
    drawn = torch.linalg.vector_norm(layout[i] - layout[j], dim=1)
    return (drawn - hours).square().mean()


def repulsion(radius=0.5):
    gap = torch.cdist(layout, layout)
    return torch.relu(radius - gap).square().sum() / N


opt = torch.optim.LBFGS([layout], lr=0.5, max_iter=4)
for outer in range(12):
    untangle = outer >= 5

    def closure():
        opt.zero_grad()
        loss = stress()
        if untangle:
            loss = loss + 0.1 * repulsion()
        loss.backward()
        return loss

    value = opt.step(closure)
    print(f"round {outer:2d} untangle={untangle} objective {value.item():.5f}")
