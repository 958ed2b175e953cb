import torch


def step(model, opt):
    for p in model.parameters():
        if torch.isnan(p.grad).any():
            opt.zero_grad()
            return
    opt.step()
