import torch
import torch.nn.functional as F


def energy(a, b):
    return torch.log((F.cosine_similarity(a, b) + 1) / 2 + 1e-4)
