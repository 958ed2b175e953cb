import torch


def gp(x: torch.Tensor):
    return torch.linalg.cholesky(x @ x.T)  # expect: WN108
