import torch
import torch.nn.functional as F


def masked_ll(mask, z):
    return torch.where(mask, F.logsigmoid(z), 0.0).sum()
