import torch


def step(model, opt):
    for p in model.parameters():
        if not torch.isfinite(p.grad).all():
            p.grad = None
    opt.step()
