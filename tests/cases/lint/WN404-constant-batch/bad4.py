import torch


def rescale(x: torch.Tensor):
    low, high = x.amin(1), x.amax(1)
    some = torch.arange(len(x)) > 3
    return (x - low)[some] / (high[some] - low[some])  # expect: WN404
