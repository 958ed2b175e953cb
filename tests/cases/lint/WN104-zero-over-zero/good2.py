import torch


def unit(v):
    n = v.norm()
    if n == 0:
        return v
    return v / n
