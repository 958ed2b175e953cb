import torch


def softplus(x):
    return torch.log(1 + torch.exp(x))  # expect: WN201
