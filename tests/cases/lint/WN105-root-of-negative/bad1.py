import torch


def spread(x: torch.Tensor):
    return torch.sqrt((x * x).mean() - x.mean() ** 2)  # expect: WN105
