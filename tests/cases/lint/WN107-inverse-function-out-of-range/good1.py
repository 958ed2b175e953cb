import torch


def angle(a: torch.Tensor, b: torch.Tensor):
    return torch.acos((a * b).sum(-1).clamp(-1 + 1e-6, 1 - 1e-6))
