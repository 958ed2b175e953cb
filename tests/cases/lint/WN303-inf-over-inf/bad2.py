import torch


def sigmoid(x):
    return torch.exp(x) / (1 + torch.exp(x))  # expect: WN303
