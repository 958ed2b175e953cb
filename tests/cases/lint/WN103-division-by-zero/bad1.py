import torch


def odds(logit):
    p = torch.sigmoid(logit)
    return p / (1 - p)  # expect: WN103
