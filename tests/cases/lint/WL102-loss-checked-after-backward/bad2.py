import torch


def step(loss, opt):
    loss.backward()
    if not torch.isfinite(loss):  # expect: WL102
        return
    opt.step()
