import torch


@torch.no_grad()
def rmse(a, b):
    return torch.sqrt(((a - b) ** 2).mean())
