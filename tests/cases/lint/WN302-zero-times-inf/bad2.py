import torch


def bce(y, z):
    p = torch.sigmoid(z)
    return -(y * p.log()).mean()  # expect: WN302
