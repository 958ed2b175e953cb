import torch
import torch.nn.functional as F


def policy(logits, legal, move):
    logits = logits.masked_fill(~legal, float("-inf"))
    return F.cross_entropy(logits, move)  # expect: WN405
