import torch


def widths(members):
    return torch.var(members, dim=0, correction=0)
