import torch


def ratio(a: torch.Tensor, b: torch.Tensor):
    q = a.div(b)
    q = q.nan_to_num(0.0)  # expect: WL104
    return q
