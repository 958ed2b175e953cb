import math

import torch


def step(model, opt, loss):
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if math.isnan(norm):
        print("bad norm")
    if torch.isfinite(norm):
        opt.step()
