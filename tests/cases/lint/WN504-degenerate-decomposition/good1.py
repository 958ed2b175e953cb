import torch


def axes(x: torch.Tensor):
    cov = x.T @ x
    _, v = torch.linalg.eigh(cov.detach())
    return v
