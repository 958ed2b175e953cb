import torch


def fold(t: torch.Tensor, period: torch.Tensor):
    return torch.remainder(t, period)  # expect: WN109
