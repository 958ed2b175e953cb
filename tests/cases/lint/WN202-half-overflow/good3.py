import torch


def energy(x: torch.Tensor):
    return x.float().square().mean()
