"""Licence plates drawn from a small font, generated from a seed."""

import torch

LETTERS = "ADFJKLSTYZ"
FONT = {
    "A": "010101111101101", "D": "110101101101110", "F": "111100110100100", "J": "001001001101111", "K": "101101110101101",
    "L": "100100100100111", "S": "111100111001111", "T": "111010010010010", "Y": "101101010010010", "Z": "111001010100111",
}
HEIGHT, WIDTH, MOST, BLANK = 16, 48, 5, 0


def glyph(letter: str) -> torch.Tensor:
    bits = torch.tensor([float(b) for b in FONT[letter]]).view(5, 3)
    return bits.repeat_interleave(2, 0).repeat_interleave(2, 1)


class Plates:
    """Plates of three to five letters, somewhere in the picture, with dirt and changing light."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.glyphs = [glyph(letter) for letter in LETTERS]

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.generator))

    def plate(self) -> tuple[torch.Tensor, list[int]]:
        picture = torch.zeros(HEIGHT, WIDTH)
        letters = [self.number(0, 10) for _ in range(self.number(3, MOST + 1))]
        top, left = self.number(1, 5), self.number(1, WIDTH - 9 * len(letters))
        for letter in letters:
            picture[top : top + 10, left : left + 6] = self.glyphs[letter]
            left += 9
        light = 0.6 + 0.8 * torch.rand((), generator=self.generator)
        return light * picture + 0.1 * torch.randn(HEIGHT, WIDTH, generator=self.generator), [n + 1 for n in letters]

    def batch(self, size: int):
        """Return pictures, the letters of all plates in one row (1 to 10, 0 is CTC's blank), and how many each plate has."""
        drawn = [self.plate() for _ in range(size)]
        targets = torch.tensor([n for _, letters in drawn for n in letters])
        return torch.stack([p for p, _ in drawn])[:, None], targets, torch.tensor([len(n) for _, n in drawn])
