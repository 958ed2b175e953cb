import torch


def degree_mean(total, degree):
    safe = torch.where(degree > 0, degree, 1.0)
    return torch.where(degree > 0, total / safe, 0.0)
