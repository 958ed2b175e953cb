import torch


def load(path, **options):
    return torch.load(path, **options)
