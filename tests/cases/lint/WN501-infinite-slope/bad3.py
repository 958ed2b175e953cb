import torch


def spectrum_loss(re, im):
    return torch.hypot(re, im).mean()  # expect: WN501
