import torch


def attend(scores, pad):
    scores = scores.masked_fill(pad[:, None], float("-inf"))
    return torch.softmax(scores, dim=-1)  # expect: WN401
