import torch


def distance_loss(a, b):
    return torch.sqrt(((a - b) ** 2).sum(-1)).mean()  # expect: WN501
