import torch
import torch.nn.functional as F


def rmsle(x: torch.Tensor, w: torch.Tensor):
    return torch.log1p(F.relu(x @ w))
