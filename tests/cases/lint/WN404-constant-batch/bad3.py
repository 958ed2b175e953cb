import torch


def fvu(y: torch.Tensor, residual: torch.Tensor):
    total = (y - y.mean(0)).var()
    return residual.square().mean() / total  # expect: WN404
