import torch


def rmsle(x: torch.Tensor, w: torch.Tensor):
    return torch.log1p(x @ w)  # expect: WN102
