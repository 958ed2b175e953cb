import torch


def attend(scores, pad):
    empty = pad.all(dim=-1, keepdim=True)
    scores = scores.masked_fill(pad & ~empty, float("-inf"))
    return torch.softmax(scores, dim=-1)
