import torch


def entropy(p: torch.Tensor):
    return torch.log(1 - p.clamp(1e-9, 1 - 1e-9))  # expect: WN204
