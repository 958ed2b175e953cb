import torch


def ratio(a: torch.Tensor, b: torch.Tensor):
    return a.div(b.clamp_min(1e-3))
