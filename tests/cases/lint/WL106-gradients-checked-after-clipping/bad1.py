import torch
from torch import nn


def step(model, loss, opt):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if any(torch.isnan(p.grad).any() for p in model.parameters()):  # expect: WL106
        return
    opt.step()
