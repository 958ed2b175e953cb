import torch


def energy(x: torch.Tensor):
    h = x.half()  # expect: WN202
    return h.square().mean()  # expect: WN202
