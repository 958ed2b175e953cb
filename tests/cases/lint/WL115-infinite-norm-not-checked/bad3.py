import torch
from torch import nn


def train(model, data, opt):
    for x in data:
        model(x).backward()
        grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if grad_norm.isnan():  # expect: WL115
            continue
        opt.step()
