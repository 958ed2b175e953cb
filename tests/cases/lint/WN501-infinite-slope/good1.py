import torch


def distance_loss(a, b):
    return torch.linalg.vector_norm(a - b, dim=-1).mean()
