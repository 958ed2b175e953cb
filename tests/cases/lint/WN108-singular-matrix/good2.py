import torch


def head(phi: torch.Tensor, y, ridge=1e-3):
    gram = phi.T @ phi + ridge * torch.eye(phi.shape[1])
    return torch.linalg.solve(gram, phi.T @ y)
