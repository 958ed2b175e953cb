import torch


def step(loss, opt):
    loss.backward()
    assert not torch.isnan(loss)  # expect: WL102
    opt.step()
