import math
import torch
from torch import nn


def step(model, loss, opt):
    loss.backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if not math.isnan(total):  # expect: WL115
        opt.step()
