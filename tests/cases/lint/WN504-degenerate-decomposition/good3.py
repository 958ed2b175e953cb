import torch


def spectrum(x: torch.Tensor):
    return torch.linalg.eigvalsh(x.T @ x)
