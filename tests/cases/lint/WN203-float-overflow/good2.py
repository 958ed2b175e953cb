import torch


def transmittance(alpha):
    return torch.cumprod(torch.sigmoid(alpha), dim=-1)
