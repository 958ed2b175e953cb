import torch


def back(p):
    return torch.logit(torch.sigmoid(p), eps=1e-6)
