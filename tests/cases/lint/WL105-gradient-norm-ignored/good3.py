import torch
from torch import nn


def step(model, loss, opt):
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    opt.step()
