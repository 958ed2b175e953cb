"""Metric learning with squared distances by expansion, floored before the root."""
import torch

torch.manual_seed(19)
n_items, dim = 480, 24
kind = torch.randint(0, 4, (n_items,))
centers = torch.randn(4, dim) * 2
catalogue = centers[kind] + torch.randn(n_items, dim) + 6.0
catalogue[333] = catalogue[329] + 1e-5 * torch.randn(dim)  # the same article, photographed twice
kind[333] = kind[329]

W = (torch.eye(dim) + 0.05 * torch.randn(dim, dim)).requires_grad_()
bias = torch.zeros(dim, requires_grad=True)


def pair_distances(items):
    z = items @ W + bias
    sq = (z * z).sum(1)
    d2 = sq[:, None] + sq[None, :] - 2 * z @ z.T
    i, j = torch.triu_indices(len(items), len(items), offset=1)
    return d2[i, j].clamp_min(1e-6).sqrt(), i, j


def hinge(dist, same):
    return torch.where(same, dist, (8.0 - dist).clamp(min=0)).mean()


velocity = [torch.zeros_like(W), torch.zeros_like(bias)]
for k, idx in enumerate(torch.arange(n_items).split(16)):
    dist, i, j = pair_distances(catalogue[idx])
    loss = hinge(dist, kind[idx][i] == kind[idx][j])
    loss.backward()
    with torch.no_grad():
        for p, v in zip((W, bias), velocity):
            v.mul_(0.8).add_(p.grad)
            p.sub_(0.01 * v)
            p.grad = None
    if k % 4 == 0:
        print(f"batch {k:02d} hinge {loss.item():.5f}")
