import torch


def expected_log(x: torch.Tensor):
    return torch.digamma(x.abs())  # expect: WN109
