import torch


def clear(model):
    for p in model.parameters():
        p.grad = None
