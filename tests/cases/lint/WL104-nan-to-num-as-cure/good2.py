import torch


@torch.no_grad()
def report(x: torch.Tensor):
    return torch.nan_to_num(x).mean()
