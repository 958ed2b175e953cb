import torch


def normalise(p):
    return p / (p.sum(dim=1, keepdim=True) + 1e-6)
