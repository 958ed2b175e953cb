import torch


def fvu(y: torch.Tensor, residual: torch.Tensor):
    total = y.var()
    if total == 0:
        return residual.sum() * 0
    return residual.square().mean() / total
