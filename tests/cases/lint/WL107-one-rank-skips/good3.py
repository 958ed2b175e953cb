import torch
from torch.nn.parallel import DistributedDataParallel


def train(model, data, opt):
    model = DistributedDataParallel(model)
    for x in data:
        model(x).mean().backward()
        opt.step()
