import torch


def min_max(x):
    return (x - x.min()) / (x.max() - x.min() + 1e-6)
