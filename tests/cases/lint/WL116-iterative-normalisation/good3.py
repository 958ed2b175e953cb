import torch


def rows(p, n):
    for _ in range(n):
        p = p / (p.sum(dim=1, keepdim=True) + 1e-6)
    return p
