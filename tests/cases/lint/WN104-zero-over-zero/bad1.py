import torch


def unit(v):
    return v / v.norm(dim=-1, keepdim=True)  # expect: WN104
