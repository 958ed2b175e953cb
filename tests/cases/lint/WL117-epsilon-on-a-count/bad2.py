import torch


def masked_mean(x: torch.Tensor, valid_mask: torch.Tensor) -> torch.Tensor:
    total = (x * valid_mask.unsqueeze(-1)).sum(dim=1)
    count = valid_mask.sum(dim=1, keepdim=True) + 1e-9
    return total / count  # expect: WL117
