import torch


def volume(x: torch.Tensor):
    return torch.logdet(x @ x.T)  # expect: WN108
