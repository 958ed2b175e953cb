import torch


def attend(scores):
    if torch.eq(scores, -torch.inf).all():  # expect: WL114
        return scores * 0
    return torch.softmax(scores, -1)
