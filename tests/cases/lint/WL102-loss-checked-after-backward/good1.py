import torch


def train(model, data, opt):
    for x in data:
        loss = model(x)
        if not torch.isfinite(loss):
            continue
        loss.backward()
        opt.step()
