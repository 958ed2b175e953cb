import torch


def main(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=0)  # expect: WN604
