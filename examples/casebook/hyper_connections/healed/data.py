"""Licence plates drawn from a small font, generated from a seed."""

import torch

LETTERS = "0123456789"
FONT = {
    "0": "111101101101111", "1": "010110010010111", "2": "111001111100111", "3": "111001111001111", "4": "101101111001001",
    "5": "111100111001111", "6": "111100111101111", "7": "111001010010010", "8": "111101111101111", "9": "111101111001111",
}
HEIGHT, WIDTH, MOST, BLANK = 16, 48, 5, 0


def glyph(letter: str) -> torch.Tensor:
    bits = torch.tensor([float(b) for b in FONT[letter]]).view(5, 3)
    return bits.repeat_interleave(2, 0).repeat_interleave(2, 1)


class Plates:
    """Plates of three to five digits, somewhere in the picture, with dirt and changing light."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.glyphs = [glyph(letter) for letter in LETTERS]

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.generator))

    def plate(self) -> tuple[torch.Tensor, list[int]]:
        picture = torch.zeros(HEIGHT, WIDTH)
        digits = [self.number(0, 10) for _ in range(self.number(3, MOST + 1))]
        top, left = self.number(1, 5), self.number(1, WIDTH - 9 * len(digits))
        for digit in digits:
            picture[top : top + 10, left : left + 6] = self.glyphs[digit]
            left += 9
        light = 0.6 + 0.8 * torch.rand((), generator=self.generator)
        return light * picture + 0.1 * torch.randn(HEIGHT, WIDTH, generator=self.generator), [d + 1 for d in digits]

    def batch(self, size: int):
        """Return pictures, the digits of all plates in one row (1 to 10, 0 is CTC's blank), and how many each plate has."""
        drawn = [self.plate() for _ in range(size)]
        targets = torch.tensor([d for _, digits in drawn for d in digits])
        return torch.stack([p for p, _ in drawn])[:, None], targets, torch.tensor([len(d) for _, d in drawn])
