import torch
import torch.nn.functional as F


def unit(v):
    return F.normalize(v, dim=-1)
