import torch


def widths(members):
    return torch.var(members, dim=0)  # expect: WN403
