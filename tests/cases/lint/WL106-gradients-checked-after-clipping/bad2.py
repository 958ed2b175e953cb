import torch
from torch import nn


def step(model, loss, opt):
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    bad = [n for n, p in model.named_parameters() if not torch.isfinite(p.grad).all()]  # expect: WL106
    print(bad)
    opt.step()
