import torch


def attend(scores, pad):
    scores = scores.masked_fill(pad[:, None], torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1)
