import torch


def encode(x: torch.Tensor, ends):
    if ends is None:
        line = (x - x.min()) / (x.max() - x.min())  # expect: WN404
    else:
        line = x - ends[0]
    return line
