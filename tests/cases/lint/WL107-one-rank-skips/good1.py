import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import torch


def train(model, data, opt):
    model = DistributedDataParallel(model)
    for x in data:
        loss = model(x).mean()
        bad = (~torch.isfinite(loss)).float()
        dist.all_reduce(bad)
        if torch.isnan(loss) or bad > 0:
            continue
        loss.backward()
        opt.step()
