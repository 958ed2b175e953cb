import torch


def masked_ll(mask, z):
    return (mask * torch.log(torch.sigmoid(z))).sum()  # expect: WN302
