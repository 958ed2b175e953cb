import torch


def rank_loss(near: torch.Tensor, far: torch.Tensor):
    return -torch.log(torch.sigmoid(far - near)).mean()  # expect: WN101
