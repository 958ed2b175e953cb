import torch


def sinkhorn(p, n):
    for _ in range(n):
        p /= p.sum(dim=-1, keepdim=True)  # expect: WL116
        p /= p.sum(dim=-2, keepdim=True)
    return p
