import torch
from torch.nn.parallel import DistributedDataParallel


def train(model, data, opt):
    model = DistributedDataParallel(model)
    for x in data:
        loss = model(x).mean()
        if torch.isnan(loss):  # expect: WL107
            continue
        loss.backward()
        opt.step()
