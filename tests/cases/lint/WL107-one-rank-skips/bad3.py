import torch
from torch.distributed.fsdp import FullyShardedDataParallel


def train(model, data, opt):
    model = FullyShardedDataParallel(model)
    for x in data:
        loss = model(x).mean()
        if loss.isnan() or loss.isinf():  # expect: WL107
            continue
        loss.backward()
        opt.step()
