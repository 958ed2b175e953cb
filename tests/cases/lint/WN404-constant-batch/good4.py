import torch


def rescale(x: torch.Tensor):
    low, high = x.amin(1), x.amax(1)
    spread = high != low
    return (x - low)[spread] / (high[spread] - low[spread])
