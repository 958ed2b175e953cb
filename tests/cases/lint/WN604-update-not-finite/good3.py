import torch


def main(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
