import torch


def step(model, opt):
    for p in model.parameters():
        if torch.isnan(p.grad).any():  # expect: WL103
            p.grad.zero_()
    opt.step()
