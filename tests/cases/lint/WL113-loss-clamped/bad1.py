import torch


def step(model, x):
    loss = model(x).mean()
    return loss.clamp(max=100.0)  # expect: WL113
