"""What `whynan probe factory:factory` needs: a model, its loss and a sample batch."""

import torch

from data import Texts
from loss import add_noise, masked_mse
from model import TokenImageDiT


def loss(model, batch):
    noisy = add_noise(batch["image"], batch["time"], batch["noise"])
    return masked_mse(model(noisy, batch["mask"], batch["time"]), batch["noise"], batch["mask"])


def factory():
    torch.manual_seed(0)
    batch = torch.utils.data.default_collate([Texts(64, 71)[index] for index in range(8)])
    batch = {"image": batch["image"], "mask": batch["mask"], "time": torch.rand(8), "noise": torch.randn(8, 3, 8, 8)}
    return TokenImageDiT(), loss, batch
