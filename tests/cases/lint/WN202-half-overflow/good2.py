import torch


def store(x: torch.Tensor):
    return torch.tanh(x).to(torch.float16)
