import torch
from torch import nn


def step(model, loss, opt):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)  # expect: WL105
    opt.step()
