import torch


def weighted(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (x * weights).sum() / (weights.sum() + 1e-8)


def attention(scores: torch.Tensor) -> torch.Tensor:
    unmasked = scores.softmax(-1)
    return unmasked / (unmasked.sum(-1, keepdim=True) + 1e-8)
