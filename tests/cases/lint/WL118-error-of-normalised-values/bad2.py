import torch
from torch import nn


class LatentLoss(nn.Module):
    def forward(self, output: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        a = (output - output.mean(-1, keepdim=True)) / (output.std(-1, keepdim=True) + 1e-6)
        b = (latents - latents.mean(-1, keepdim=True)) / (latents.std(-1, keepdim=True) + 1e-6)
        return ((a - b) ** 2).mean()  # expect: WL118
