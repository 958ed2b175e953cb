import torch.nn.functional as F


def latent_loss(pred, target):
    pred = (pred - pred.mean()) / pred.std()
    target = (target - target.mean()) / target.std()
    return F.mse_loss(pred, target)  # expect: WL118
