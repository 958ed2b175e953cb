import torch


def untanh(x):
    return torch.atanh(torch.tanh(x).clamp(-0.999, 0.999))
