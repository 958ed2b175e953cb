import torch


def volume(sides: torch.Tensor):
    return torch.prod(sides, dim=-1)  # expect: WN203
