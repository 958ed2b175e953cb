import torch


def train(model, data, opt):
    for x in data:
        loss = model(x)
        loss.backward()
        if torch.isnan(loss):  # expect: WL102
            continue
        opt.step()
