import torch
import torch.nn.functional as F


def pick(logits: torch.Tensor, used: torch.Tensor):
    logits[used] = -torch.inf
    return F.log_softmax(logits, dim=-1)  # expect: WN401
