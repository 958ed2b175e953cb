import torch


def lse(x):
    m = x.max(-1, keepdim=True).values
    return (x - m).exp().sum(-1).log() + m.squeeze(-1)
