import torch


def back(p):
    return torch.logit(torch.sigmoid(p))  # expect: WN107
