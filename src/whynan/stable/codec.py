"""Token ids as colours: three digits to the base 256, and back, with ids that do not fit refused by name."""

from __future__ import annotations

import torch
from torch import Tensor

_LIMIT = 256**3


def tokens_to_rgb(ids: Tensor, vocabulary: int = _LIMIT) -> Tensor:
    """Return the three base-256 digits of each id, most significant first, as bytes in a new last dimension.

    The plain form (`ids // 65536`, `ids // 256 % 256`, `ids % 256`) takes -1 or an id past the vocabulary without a word and gives another token's colour.
    At the edge: an id below 0 or from `vocabulary` on is refused with the id and its position. No gradient: ids are integers.
    Elsewhere: the digits of the plain form, exactly.

    >>> tokens_to_rgb(torch.tensor([65, 50256]))
    tensor([[  0,   0,  65],
            [  0, 196,  80]], dtype=torch.uint8)
    >>> tokens_to_rgb(torch.tensor([[5, 50257]]), vocabulary=50257)
    Traceback (most recent call last):
    ValueError: token id 50257 at position [0, 1] is outside 0..50256

    Cost: one reduction more, 1.0 to 1.3 times the time of the plain form; the host waits for it, and a compiled graph breaks here:
    encode where the data is loaded.
    """
    if not 1 <= vocabulary <= _LIMIT:
        raise ValueError(f"three bytes hold 1 to {_LIMIT} ids, got a vocabulary of {vocabulary}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"token ids are whole numbers, got {ids.dtype}")
    _refuse_outside("token id", ids, vocabulary)
    wide = ids.to(torch.int64)
    return torch.stack((wide >> 16, wide >> 8 & 255, wide & 255), dim=-1).to(torch.uint8)


def rgb_to_tokens(rgb: Tensor, vocabulary: int = _LIMIT, *, clip: bool = False) -> Tensor:
    """Return the id that each colour (last dimension, three numbers from 0 to 255) stands for.

    Numbers that are not whole, as a model predicts them, are rounded to the nearest byte.

    The plain form turns NaN into an arbitrary id and -3 or 260 into a neighbour's digit.
    At the edge: NaN, and bytes or ids out of range, are refused with value and position; with `clip` bytes are brought to 0..255 and ids to the last of the
    vocabulary, NaN is still refused. No gradient: ids are integers. The inverse of `tokens_to_rgb`, exactly.

    >>> rgb_to_tokens(torch.tensor([[0.2, 195.7, 80.4]]))
    tensor([50256])

    Cost: two reductions more; the host waits for them, and a compiled graph breaks here.
    """
    if rgb.dim() == 0 or rgb.shape[-1] != 3:
        raise ValueError(f"the last dimension must hold 3 numbers, got shape {tuple(rgb.shape)}")
    numbers = rgb.round() if rgb.is_floating_point() else rgb
    if clip:
        numbers = numbers.clamp(0, 255)
    _refuse_outside("colour", numbers, 256)
    red, green, blue = numbers.to(torch.int64).unbind(-1)
    ids = red << 16 | green << 8 | blue
    if clip:
        return ids.clamp_max(vocabulary - 1)
    _refuse_outside("token id", ids, vocabulary)
    return ids


def _refuse_outside(what: str, values: Tensor, limit: int) -> None:
    """Raise for the first value that is not from 0 to limit - 1."""
    if values.numel() == 0:
        return
    low, high = (end.item() for end in values.aminmax())  # as Python numbers: a byte is never below 256, which is 0 as a byte
    if low >= 0 and high < limit:  # false for NaN
        return
    wide = values.double()
    first = ((wide >= 0) & (wide < limit)).logical_not().nonzero()[0]
    value = values[tuple(first)].item()
    raise ValueError(f"{what} {value:g} at position {first.tolist()} is outside 0..{limit - 1}")
