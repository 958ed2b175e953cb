import torch


def untanh(x):
    return torch.atanh(torch.tanh(x))  # expect: WN107
