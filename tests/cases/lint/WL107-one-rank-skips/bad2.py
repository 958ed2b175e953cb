import torch.distributed as dist
import torch


def train(model, data, opt):
    dist.init_process_group("nccl")
    for x in data:
        loss = model(x).mean()
        if not torch.isfinite(loss):  # expect: WL107
            opt.zero_grad()
            continue
        loss.backward()
        opt.step()
