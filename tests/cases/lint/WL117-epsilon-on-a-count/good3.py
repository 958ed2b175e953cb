import torch


def dice_loss(p: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return 1 - (2 * (p * t).sum() + 1e-8) / (p.sum() + t.sum() + 1e-8)


def careful(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (x * mask).sum() / (mask.sum() + 1e-5)
