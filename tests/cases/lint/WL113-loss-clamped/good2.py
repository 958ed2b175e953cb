import torch


def hinge(margin):
    return margin.clamp(min=0)
