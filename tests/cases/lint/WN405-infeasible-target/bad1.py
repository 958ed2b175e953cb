import torch
import torch.nn.functional as F


def speech(logp, y, n, m):
    return F.ctc_loss(logp, y, n, m)  # expect: WN405
