import torch


def loss(pred: torch.Tensor, y):
    error = (pred - y).square().mean()
    return torch.nan_to_num(error)  # expect: WL104
