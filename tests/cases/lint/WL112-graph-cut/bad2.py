import torch


def step(model, x):
    loss = model(x)
    if torch.isnan(loss):
        loss = torch.tensor(0.0)  # expect: WL112
    return loss
