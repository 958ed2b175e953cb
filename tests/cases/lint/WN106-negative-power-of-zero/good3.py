import torch


def degree_norm(adj: torch.Tensor):
    return (adj > 0).sum(1).clamp_min(1).pow(-0.5)
