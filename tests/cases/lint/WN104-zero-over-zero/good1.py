import torch


def unit(v):
    return v / v.norm(dim=-1, keepdim=True).clamp_min(1e-6)
