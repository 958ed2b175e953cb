import torch

LARGEST_HALF = 65504


def total(raw_loss):
    return torch.clamp(raw_loss, min=0, max=LARGEST_HALF).mean()
