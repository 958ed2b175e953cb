import torch


def rank_loss(near: torch.Tensor, far: torch.Tensor):
    return -torch.log(torch.sigmoid(torch.acos(far.clamp(-0.9, 0.9)) - torch.atan(near))).mean()
