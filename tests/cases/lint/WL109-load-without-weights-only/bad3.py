import torch


def load(path):
    return torch.load(path, weights_only=False)  # expect: WL109
