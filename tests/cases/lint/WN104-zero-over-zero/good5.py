import torch


def shrink(v: torch.Tensor):
    length = v.norm(dim=1)
    rows = torch.where(length > 0)
    v[rows] = v[rows] / length[rows]
    return v
