import torch


def discounts(step: torch.Tensor):
    return step.exp().cumprod(dim=0)  # expect: WN203
