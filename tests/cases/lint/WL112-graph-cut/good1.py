import torch


def fvu(residual: torch.Tensor, variance):
    loss = residual.square().sum() / (variance + 1)
    if variance == 0:
        loss = loss * 0
    return loss
