import torch
import torch.nn.functional as F


def policy(logits, legal, move):
    logits = logits.masked_fill(~legal, -1e4)
    return F.cross_entropy(logits, move)
