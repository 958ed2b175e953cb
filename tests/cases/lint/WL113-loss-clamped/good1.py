import torch
import torch.nn.functional as F


def step(model, x):
    return F.huber_loss(model(x), x)
