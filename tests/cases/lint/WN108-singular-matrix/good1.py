import torch


def gp(x: torch.Tensor):
    k = x @ x.T
    return torch.linalg.cholesky(k + 1e-4 * torch.eye(len(k)))
