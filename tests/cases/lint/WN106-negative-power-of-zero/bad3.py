import torch


def degree_norm(adj: torch.Tensor):
    return (adj > 0).sum(1).pow(-0.5)  # expect: WN106
