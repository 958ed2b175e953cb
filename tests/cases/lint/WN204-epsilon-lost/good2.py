import torch


def entropy(p: torch.Tensor):
    return torch.log(1 - p.clamp(1e-6, 1 - 1e-6))
