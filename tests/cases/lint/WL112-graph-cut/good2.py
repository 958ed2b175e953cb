import torch


def boxes(pred, mask):
    if mask.any():
        box_loss = pred[mask].sum()
    else:
        box_loss = pred.sum() * 0
    return box_loss
