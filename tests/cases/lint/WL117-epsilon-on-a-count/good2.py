import torch


def normalised(x: torch.Tensor) -> torch.Tensor:
    return x / (x.std(dim=-1, keepdim=True) + 1e-8)


def smoothed(hits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (hits + 1.0) / (mask.sum() + 2.0)
