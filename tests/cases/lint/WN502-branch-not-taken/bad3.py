import torch


def degree_mean(total, degree):
    degree = degree.abs()
    return torch.where(degree > 0, total / degree, 0.0)  # expect: WN502
