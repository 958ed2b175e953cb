import torch
from torch import nn


def step(model, loss, opt):
    loss.backward()
    bad = [n for n, p in model.named_parameters() if not torch.isfinite(p.grad).all()]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not bad:
        opt.step()
