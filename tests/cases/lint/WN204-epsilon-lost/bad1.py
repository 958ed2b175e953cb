import torch


def safe_log(p: torch.Tensor):
    return torch.log(p.half() + 1e-8)  # expect: WN204
