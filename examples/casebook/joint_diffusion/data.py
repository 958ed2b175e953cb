"""Pairs of a short text and a small latent image, generated from a seed: the text says what the image shows."""

import torch

VOCABULARY, MASK, TEXT, SIDE, CHANNELS = 32, 32, 12, 4, 8


class Pairs:
    """Images are one of 8 patterns times a strength; the words are the pattern's number, its neighbours and the strength."""

    def __init__(self, seed: int):
        g = torch.Generator().manual_seed(1234)  # the same world for every seed
        self.patterns = torch.randn(8, SIDE * SIDE, CHANNELS, generator=g)
        self.words = torch.randint(0, VOCABULARY - 4, (8, TEXT - 1), generator=g)
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        kind = torch.randint(0, 8, (size,), generator=self.generator)
        strength = torch.randint(0, 4, (size,), generator=self.generator)
        text = torch.cat([self.words[kind], VOCABULARY - 4 + strength[:, None]], dim=1)
        latents = self.patterns[kind] * (0.55 + 0.3 * strength[:, None, None])
        return text, latents


def noised(text: torch.Tensor, latents: torch.Tensor, generator: torch.Generator):
    """Mask a share t of the words and mix the latents with noise by a cosine schedule."""
    t = torch.rand(len(text), generator=generator)
    masked = torch.rand(text.shape, generator=generator) < t[:, None]
    noise = torch.randn(latents.shape, generator=generator)
    keep = torch.cos(0.5 * torch.pi * t)[:, None, None]
    spoil = torch.sin(0.5 * torch.pi * t)[:, None, None]
    return text.masked_fill(masked, MASK), keep * latents + spoil * noise, t, masked
