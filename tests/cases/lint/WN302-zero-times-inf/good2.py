import torch
import torch.nn.functional as F


def bce(y, z):
    return F.binary_cross_entropy_with_logits(z, y)
