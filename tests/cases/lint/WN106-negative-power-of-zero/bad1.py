import torch


def rms_norm(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))  # expect: WN106
