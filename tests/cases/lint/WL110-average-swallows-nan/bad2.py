import torch


def train(data, model):
    average = 0.0
    for x in data:
        loss = model(x)
        average = 0.99 * average + 0.01 * loss.item()  # expect: WL110
    return average
