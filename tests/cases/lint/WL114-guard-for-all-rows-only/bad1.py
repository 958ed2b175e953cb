import torch


def attend(scores):
    if (scores == float("-inf")).all():  # expect: WL114
        return torch.zeros_like(scores)
    return torch.softmax(scores, -1)
