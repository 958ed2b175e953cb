import torch


def safe_log(p: torch.Tensor):
    return torch.log(p.half().float() + 1e-8)
