"""The loss of diffusion on text that is shorter than the image."""

import math

import torch


def add_noise(image, time, noise):
    """The cosine schedule: clean at time 0, noise alone at time 1."""
    angle = (time * math.pi / 2)[:, None, None, None]
    return angle.cos() * image + angle.sin() * noise


def masked_mse(prediction, target, mask):
    """Mean squared error over the pixels that are text."""
    mask = mask[:, None].expand_as(target)
    return ((prediction - target).pow(2) * mask).sum() / mask.sum().clamp(min=1)


def denoising_loss(model, batch, random):
    image, mask = batch["image"], batch["mask"]
    time = torch.rand(len(image), generator=random)
    noise = torch.randn(image.shape, generator=random)
    prediction = model(add_noise(image, time, noise), mask, time)
    return masked_mse(prediction.float(), noise, mask)
