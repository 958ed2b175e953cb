import torch


def masked_mse(pred, target, mask):
    return ((pred - target).square() * mask).sum() / mask.sum()  # expect: WN402
