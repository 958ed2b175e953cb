import torch


def rate_loss(x: torch.Tensor):
    rate = torch.relu(x)
    return torch.nan_to_num(torch.log(rate), neginf=0.0)  # expect: WN502
