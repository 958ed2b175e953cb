import torch


def masked_loss(per_token: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return per_token.sum() / (mask.sum() + 1e-8)  # expect: WL117
