import torch


def step(model, opt, norm):
    if torch.isnan(norm):
        pass
    for p in model.parameters():
        if not torch.isfinite(p.grad).all():  # expect: WL103
            p.grad = torch.zeros_like(p)
    opt.step()
