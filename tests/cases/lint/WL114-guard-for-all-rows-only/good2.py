import torch


def check(mask):
    if mask.all():
        return None
    return mask
