import torch


def head(phi: torch.Tensor, y):
    gram = phi.T @ phi
    return torch.linalg.solve(gram, phi.T @ y)  # expect: WN108
