import torch


def store(x: torch.Tensor):
    return x.to(torch.bfloat16)
