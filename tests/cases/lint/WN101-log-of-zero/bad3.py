import torch
import torch.nn.functional as F


def loss(scores, target):
    prob = F.relu(scores)
    return -(prob * torch.log(prob)).sum()  # expect: WN101
