"""A number for every row: equal rows have equal keys. Dense rows that are long give a sample of their words, so the key is a first sieve."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from whynan.forensics.data.tables import Block, Piece

if TYPE_CHECKING:
    from whynan.forensics.data.tables import Array

_WORDS = 16  # words of a row that are looked at; the rest is compared only where two keys are equal


def keys_of(block: Block, which: tuple[int, ...]) -> Array:
    """Return one 64-bit key per row from some of a block's columns.

    Cost: for dense columns a few passes over at most 16 words a row; for ragged ones a hash of all bytes.
    """
    import numpy as np

    keys = np.zeros(block.rows, np.uint64)
    for number in which:
        keys = _stir(keys + np.uint64(0x9E3779B97F4A7C15)) + piece_keys(block.pieces[number])
    return keys


def row_bytes(piece: Piece, rows: Array) -> list[bytes]:
    """Return everything that is known of some rows of a piece, to compare them exactly."""
    import numpy as np

    missing = piece.missing if piece.missing is not None else np.zeros(piece.rows, bool)
    if piece.lengths is None:
        return [b"" if missing[r] else piece.values[r].tobytes() for r in rows]
    ends = np.cumsum(piece.lengths)
    return [b"" if missing[r] else piece.values[ends[r] - piece.lengths[r] : ends[r]].tobytes() for r in rows]


def piece_keys(piece: Piece) -> Array:
    """Return one 64-bit key per row of one column."""
    keys = _dense(piece.values) if piece.lengths is None else _ragged(piece)
    if piece.missing is not None:
        keys[piece.missing] = 1
    return keys


def _dense(values: Array) -> Array:
    import numpy as np

    words = _sample(np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1))
    # Floats with short mantissas differ in their high bits only, which a product modulo 2**64 would throw away: fold them down first.
    folded = words ^ (words >> np.uint64(32))
    folded ^= folded >> np.uint64(16)
    folded *= _factors(words.shape[1])
    return _stir(folded.sum(axis=1, dtype=np.uint64))


def _sample(raw: Array) -> Array:
    import numpy as np

    size = raw.shape[1]
    if size % 8 == 0:
        words = raw.view(np.uint64)
        return words if size <= 8 * _WORDS else words[:, _places(size // 8)]
    if size > 8 * _WORDS:
        starts = np.append(_places(size // 8) * 8, size - 8)
        return np.ascontiguousarray(raw[:, (starts[:, None] + np.arange(8)).ravel()]).view(np.uint64)
    padded = np.zeros((len(raw), -(-size // 8) * 8), np.uint8)
    padded[:, :size] = raw
    return padded.view(np.uint64)


@lru_cache(maxsize=64)
def _places(words: int) -> Array:
    import numpy as np

    return np.sort(np.random.default_rng(words).choice(words, _WORDS, replace=False))


@lru_cache(maxsize=64)
def _factors(words: int) -> Array:
    import numpy as np

    return np.random.default_rng(words).integers(0, 1 << 63, words, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def _stir(keys: Array) -> Array:
    import numpy as np

    keys = (keys ^ (keys >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.asarray(keys ^ (keys >> np.uint64(29)))


def _ragged(piece: Piece) -> Array:
    import numpy as np

    assert piece.lengths is not None
    size = piece.values.dtype.itemsize
    raw = piece.values.tobytes()
    ends = np.cumsum(piece.lengths) * size
    pairs = zip((ends - piece.lengths * size).tolist(), ends.tolist(), strict=True)
    return np.fromiter((hash(raw[a:b]) for a, b in pairs), np.int64, len(ends)).view(np.uint64)
