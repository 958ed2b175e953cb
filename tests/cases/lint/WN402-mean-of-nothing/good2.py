import torch


def kept_mean(error: torch.Tensor, target: torch.Tensor):
    keep = target != -100
    return error[keep].mean() if keep.any() else error.sum() * 0
