import torch


def step(loss, scaler, opt):
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
