import torch


def bridge_penalty(w: torch.Tensor):
    return w.abs().pow(0.5).sum()  # expect: WN501
