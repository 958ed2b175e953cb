import torch


def mape(pred: torch.Tensor, actual: torch.Tensor):
    return ((pred - actual).abs() / (actual.abs() + 1e-3)).mean()
