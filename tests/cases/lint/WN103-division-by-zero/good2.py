import torch


def weights(y):
    counts = torch.bincount(y, minlength=5).float()
    return 1.0 / counts.clamp_min(1)
