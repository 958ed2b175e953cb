import torch


def standardise(returns: torch.Tensor):
    return (returns - returns.mean()) / (returns.std() + 1e-6)  # expect: WN403
