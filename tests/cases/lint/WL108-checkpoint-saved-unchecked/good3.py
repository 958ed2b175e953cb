import torch


def train(model, data, opt):
    for x in data:
        model(x).mean().backward()
        opt.step()
