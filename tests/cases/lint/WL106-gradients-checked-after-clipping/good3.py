import torch


def step(loss, opt):
    loss.backward()
    opt.step()
