import torch


def load(path):
    return torch.load(path, map_location="cpu")["model"]  # expect: WL109
