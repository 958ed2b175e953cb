import torch


def polynomial(x):
    y = 2 * x + 3 * x.sum()
    return y
