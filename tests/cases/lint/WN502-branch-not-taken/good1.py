import torch


def entropy_loss(p: torch.Tensor):
    safe = torch.where(p > 0, p, 1.0)
    return torch.where(p > 0, p * torch.log(safe), 0.0)
