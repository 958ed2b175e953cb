import torch


def main(model):
    model.half()
    optimizer = torch.optim.AdamW(model.parameters())  # expect: WN604
    return optimizer
