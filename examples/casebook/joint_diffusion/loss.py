"""Cross-entropy on the masked words, squared error on the clean latents."""

import torch
import torch.nn.functional as F


def text_loss(logits: torch.Tensor, text: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    each = F.cross_entropy(logits.float().flatten(0, 1), text.flatten(), reduction="none").view_as(text)
    return (each * masked).sum() / masked.sum().clamp(min=1)


def latent_loss(prediction: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(prediction.float(), latents.float())
