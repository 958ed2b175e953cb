import torch


def shrink(v: torch.Tensor, keep: torch.Tensor):
    length = v.norm(dim=1)
    rows = torch.where(keep)
    v[rows] = v[rows] / length[rows]  # expect: WN104
    return v
