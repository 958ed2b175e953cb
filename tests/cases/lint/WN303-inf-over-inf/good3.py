import torch


def kernel(n: int):
    x = torch.arange(n)
    k = torch.exp(-(x - n // 2) ** 2 / 2)
    return k / k.sum()
