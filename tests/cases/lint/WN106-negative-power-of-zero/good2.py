import torch


def inverse_distance(a, b):
    return torch.reciprocal((a - b).square().sum(-1) + 1e-4)
