import torch


def step(text_loss):
    text_loss = torch.clamp(text_loss, 0, 10)  # expect: WL113
    return text_loss
