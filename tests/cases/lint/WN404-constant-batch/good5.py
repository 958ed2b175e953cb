import torch


def encode(x: torch.Tensor, ends, size: float):
    if ends is None:
        line = (x - x.min()) / (x.max() - x.min())
    else:
        line = x - ends[0]
    line = (x - 0.5) / 2.0
    return line * size
