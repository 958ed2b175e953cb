import torch


def unit(v: torch.Tensor):
    floor = torch.tensor([1e-6])
    return v / torch.max(v.norm(dim=-1, keepdim=True), floor)
