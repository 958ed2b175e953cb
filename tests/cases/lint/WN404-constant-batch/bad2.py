import torch


def standardise(x):
    return (x - x.mean(0)) / x.std(0, unbiased=False)  # expect: WN404
