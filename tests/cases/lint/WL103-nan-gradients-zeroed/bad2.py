import torch


def step(model, opt):
    for p in model.parameters():
        p.grad[torch.isnan(p.grad)] = 0  # expect: WL103
    opt.step()
