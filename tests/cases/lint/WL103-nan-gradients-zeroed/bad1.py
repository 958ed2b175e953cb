import torch


def step(model, opt):
    for p in model.parameters():
        p.grad = torch.nan_to_num(p.grad)  # expect: WL103
    opt.step()
