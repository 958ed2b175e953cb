import torch


def spread(x: torch.Tensor):
    return torch.sqrt(x.var(unbiased=False) + 1e-6)
