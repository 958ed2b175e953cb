import torch
from torch import nn


def train(model, data, scaler, opt):
    for x in data:
        loss = model(x)
        scaler.scale(loss).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # expect: WL101
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
