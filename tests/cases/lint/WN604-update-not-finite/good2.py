import torch


def main(model):
    model.half()
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4)
