"""Text as an image: a token id is three digits to the base 256, and those are red, green and blue of one pixel."""

import torch

VOCABULARY, SIDE = 100_000, 8
PIXELS = SIDE * SIDE
SYLLABLES = "ka mo re ti su no la ve po shi".split()


class Texts(torch.utils.data.Dataset):
    """Generated messages; nearly all fill a good part of the image, a few are one or two words."""

    def __init__(self, size, seed):
        random = torch.Generator().manual_seed(seed)
        self.words = torch.randint(1, VOCABULARY, (200,), generator=random)
        lengths = torch.randint(16, PIXELS + 1, (size,), generator=random)
        short = torch.rand(size, generator=random) < 0.0015
        self.lengths = torch.where(short, torch.randint(1, SIDE + 1, (size,), generator=random), lengths).tolist()
        self.starts = torch.randint(200, (size,), generator=random).tolist()

    def __len__(self):
        return len(self.lengths)

    def tokens(self, index):
        """Every word is followed by the one 7 places on, so that there is something to learn."""
        places = (self.starts[index] + 7 * torch.arange(self.lengths[index])) % len(self.words)
        return self.words[places]

    def text(self, tokens):
        return " ".join("".join(SYLLABLES[int(digit)] for digit in str(token)[-3:]) for token in tokens.tolist())

    def __getitem__(self, index):
        tokens = self.tokens(index)
        mask = torch.zeros(PIXELS)
        mask[: len(tokens)] = 1.0
        ids = torch.zeros(PIXELS, dtype=torch.long)
        ids[: len(tokens)] = tokens
        return {"image": encode(ids), "mask": mask.view(SIDE, SIDE), "text": self.text(tokens)}


def encode(ids):
    """Token ids [64] to an image [3, 8, 8] with values from -1 to 1."""
    if ids.min() < 0 or ids.max() >= VOCABULARY:
        place = int(((ids < 0) | (ids >= VOCABULARY)).nonzero()[0])
        raise ValueError(f"token id {int(ids[place])} at position {place} is outside the vocabulary of {VOCABULARY}")
    digits = torch.stack([ids // 256**2, ids // 256 % 256, ids % 256])
    return (digits / 127.5 - 1.0).view(3, SIDE, SIDE)
