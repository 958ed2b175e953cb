import torch


def low_rank(x: torch.Tensor):
    return torch.svd(x)[0]  # expect: WN504
