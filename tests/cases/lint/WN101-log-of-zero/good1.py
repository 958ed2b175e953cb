import torch


def nll(logits, y):
    return -torch.log_softmax(logits, dim=-1)[y]
