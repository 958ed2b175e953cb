import torch


def angle(a: torch.Tensor, b: torch.Tensor):
    return torch.acos((a * b).sum(-1))  # expect: WN107
