import torch


def head(phi: torch.Tensor, y):
    return torch.linalg.lstsq(phi, y).solution
