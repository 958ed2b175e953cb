import torch


def update(prior, batch, momentum):
    prior = momentum * prior + (1 - momentum) * batch.mean(0)  # expect: WL110
    return prior
