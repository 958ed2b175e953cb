import torch


def loss(scores):
    p = torch.sigmoid(scores).clamp(1e-6, 1 - 1e-6)
    return torch.log(p).mean()
