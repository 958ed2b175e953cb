import torch


def cross_entropy(y, logits):
    p = torch.softmax(logits, -1)
    return -(y * torch.log(p)).sum(-1)  # expect: WN302
