import torch
import torch.nn.functional as F


def cosine_loss(pred: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(F.normalize(pred, dim=-1), F.normalize(target, dim=-1))


def masked_autoencoder_loss(pred: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6) ** 0.5
    return (pred - target).pow(2).mean()
