import torch


def stats(x: torch.Tensor):
    if len(x) < 2:
        return x.sum() * 0
    return x.std()
