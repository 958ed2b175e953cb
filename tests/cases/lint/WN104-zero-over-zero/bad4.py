import torch


def unit(v: torch.Tensor):
    return v / torch.max(v.abs(), dim=-1, keepdim=True)[0]  # expect: WN104
