import torch


def export(model):
    torch.save(model.state_dict(), "last.pt")
