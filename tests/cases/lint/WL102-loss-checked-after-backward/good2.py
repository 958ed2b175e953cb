import torch


def step(loss, opt):
    assert torch.isfinite(loss)
    loss.backward()
    opt.step()
