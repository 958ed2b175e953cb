import torch


def sinkhorn(cost, n=20):
    p = torch.exp(-cost)
    for _ in range(n):
        p = p / p.sum(dim=1, keepdim=True)  # expect: WL116
        p = p / p.sum(dim=0, keepdim=True)
    return p
