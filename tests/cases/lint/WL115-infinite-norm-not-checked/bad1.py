import torch
from torch import nn


def step(model, loss, opt):
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isnan(norm):  # expect: WL115
        return
    opt.step()
