import torch


def rms(x: torch.Tensor):
    return torch.sqrt(x.pow(2).mean(-1) + 1e-20)  # expect: WN204
