import torch


def train(model, data, opt):
    for x in data:
        loss = model(x).mean()
        if torch.isnan(loss):
            continue
        loss.backward()
        opt.step()
