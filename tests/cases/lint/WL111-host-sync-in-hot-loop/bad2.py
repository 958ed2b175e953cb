import torch


def train(model, data):
    for x in data:
        y = model(x)
        assert torch.isfinite(y).all(), "bad"  # expect: WL111
