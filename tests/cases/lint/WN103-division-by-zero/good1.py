import torch


def odds(logit):
    return torch.exp(logit.clamp(-20, 20))
