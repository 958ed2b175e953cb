import torch


def mape(pred: torch.Tensor, actual: torch.Tensor):
    return ((pred - actual).abs() / actual).mean()  # expect: WN103
