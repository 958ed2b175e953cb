import torch


def scores(q: torch.Tensor, k: torch.Tensor):
    q, k = q.half(), k.half()  # expect: WN202
    return (q @ k.transpose(-2, -1)) / 8  # expect: WN202
