import torch


def gamma_correct(x: torch.Tensor, w: torch.Tensor):
    return (x - w) ** (1 / 2.2)  # expect: WN105
