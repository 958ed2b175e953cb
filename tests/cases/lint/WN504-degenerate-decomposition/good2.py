import torch


@torch.no_grad()
def procrustes(a: torch.Tensor, b: torch.Tensor):
    u, s, vh = torch.linalg.svd(a.T @ b)
    return u @ vh
