import math
import torch


def train(model, data):
    for x in data:
        value = model(x)
        assert not math.isnan(value)
