import torch


def size(x: torch.Tensor):
    return x.shape[0] * x.shape[1]
