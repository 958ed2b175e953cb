"""What is gathered of one column while its blocks go by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from whynan.forensics.data.constancy import Constancy
from whynan.forensics.data.keys import piece_keys
from whynan.forensics.data.marks import Marks
from whynan.forensics.data.roles import Role, role_of, wished_range
from whynan.forensics.data.tables import Column, Piece, Sort
from whynan.forensics.wishes import Wishes

if TYPE_CHECKING:
    from whynan.forensics.data.tables import Array

_MOST_CLASSES = 4096  # different values of a column that are remembered
_GUESS_ROWS = 4096


class Tally:
    """Counts, extremes and marked rows of one column."""

    def __init__(self, column: Column, wishes: Wishes, batch: int) -> None:
        self.column = column
        self.role = role_of(column)
        self.range = wished_range(column, wishes.ranges)
        self.padding = wishes.padding if self._sequence() else None
        self.guessed = False
        self.ignored = wishes.ignored
        self.rows = 0
        self.nan = self.posinf = self.neginf = 0
        self.low, self.high = math.inf, -math.inf
        self.total = self.squares = 0.0
        self.numbers = 0  # finite values
        self.zeros = 0
        self.fractions = False  # a value that is not whole was seen
        self.values: set[float] | None = set() if column.scalar and column.sort is not Sort.TEXT else None
        self.negatives: set[float] = set()
        self.constancy = Constancy(column)
        self._variety = 0.0
        self.bad, self.missing, self.outside, self.negative = (Marks(batch) for _ in range(4))
        self.zero, self.padded, self.unlabelled, self.empty = (Marks(batch) for _ in range(4))

    def _sequence(self) -> bool:
        """Whether a row is a list of whole numbers: not a picture, not a label."""
        one_axis = self.column.shape is None or len(self.column.shape) == 1
        return self.column.sort is Sort.INTEGER and one_axis and self.role is not Role.LABEL

    def add(self, piece: Piece, start: int) -> None:
        """Take the next rows."""
        if not self.rows and not self.column.scalar:
            self._sample_variety(piece)
        self.rows += piece.rows
        if piece.missing is not None:
            self.missing.add(_where(piece.missing, start))
        if piece.lengths is not None:
            self._add_empty(piece, start)
        self.constancy.add(piece)
        if self.column.numeric and piece.values.size and (piece.missing is None or not piece.missing.all()):
            self._add_numbers(piece, start)
        elif self.column.sort is Sort.BOOL:
            self._add_rows_of(piece, start, 0, self.zero)
        if self.values is not None:
            self._remember(piece)

    def _add_empty(self, piece: Piece, start: int) -> None:
        assert piece.lengths is not None
        empty = (piece.lengths == 0) if piece.missing is None else (piece.lengths == 0) & ~piece.missing
        self.empty.add(_where(empty, start))

    def _add_numbers(self, piece: Piece, start: int) -> None:
        low, high = float(piece.values.min()), float(piece.values.max())
        values = piece.values
        if not math.isfinite(low) or not math.isfinite(high):
            low, high, values = self._add_damage(piece, start)
        self.low, self.high = min(self.low, low), max(self.high, high)
        if values.size:
            self._add_moments(values, max(abs(low), abs(high)))
        self._add_outside(piece, start, low, high)
        if not self.column.scalar:
            self._add_uniform_rows(piece, start)
        elif self.role is Role.LABEL:
            self._add_rows_of(piece, start, self.ignored, self.unlabelled)

    def _add_damage(self, piece: Piece, start: int) -> tuple[float, float, Array]:
        import numpy as np

        finite = np.isfinite(piece.values)
        given = finite if piece.missing is None or piece.lengths is not None else finite | piece.missing[:, None]  # a missing one is counted as that
        self._count(piece.values, given)
        self.bad.add(_where(_any(~given, piece), start))
        good = piece.values[finite]
        return (float(good.min()), float(good.max()), good) if good.size else (math.inf, -math.inf, good)

    def _count(self, values: Array, given: Array) -> None:
        import numpy as np

        bad = values[~given]
        nan = int(np.isnan(bad).sum())
        self.nan += nan
        positive = int((bad == np.inf).sum())
        self.posinf += positive
        self.neginf += bad.size - nan - positive

    def _add_moments(self, values: Array, largest: float) -> None:
        """Sums for mean and deviation: in float32 where it cannot overflow, block by block, summed in float64."""
        import numpy as np

        flat = values.reshape(-1)
        if flat.dtype != np.float32 or largest > 1e12:
            flat = flat.astype(np.float32 if flat.dtype.itemsize <= 2 else np.float64)
        self.numbers += flat.size
        self.zeros += int(np.count_nonzero(flat == 0))  # of floats themselves it counts one by one
        with np.errstate(over="ignore", invalid="ignore"):
            self.total += float(flat.sum())
            self.squares += float(np.dot(flat, flat))
        if self.column.sort is Sort.FLOAT and not self.fractions:
            self.fractions = bool((flat[:4096] != np.rint(flat[:4096])).any())

    def _add_outside(self, piece: Piece, start: int, low: float, high: float) -> None:
        import numpy as np

        if self.range is not None and (low < self.range[0] or high > self.range[1]):
            outside = (piece.values < self.range[0]) | (piece.values > self.range[1])
            if self.role is Role.LABEL:
                outside &= piece.values != self.ignored
            self.outside.add(_where(_any(outside, piece), start))
        if low < 0 and self.column.sort is Sort.INTEGER and (self.role is not Role.INPUT or self._sequence()):
            below = (piece.values < 0) & (piece.values != self.ignored) if self.role is Role.LABEL else piece.values < 0
            if len(self.negatives) <= 8:
                self.negatives.update(np.unique(piece.values[below])[:16].tolist())
            self.negative.add(_where(_any(below, piece), start))

    def _add_uniform_rows(self, piece: Piece, start: int) -> None:
        if self.role is Role.LABEL:
            self._add_rows_of(piece, start, self.ignored, self.unlabelled)
            return
        self._add_rows_of(piece, start, 0, self.zero)
        if self._sequence() and self.role is not Role.MASK:
            if self.padding is None and self.rows == piece.rows:
                self._guess(piece)
            if self.padding is not None:
                self._add_rows_of(piece, start, self.padding, self.padded)

    def _add_rows_of(self, piece: Piece, start: int, value: float, marks: Marks) -> None:
        marks.add(_where(_all_equal(piece, value), start))

    def _guess(self, piece: Piece) -> None:
        """Take the value that ends most rows, twice over, for padding: a guess, and said to be one."""
        import numpy as np

        if piece.lengths is not None or piece.values.shape[1] < 4:
            return
        tails = piece.values[:_GUESS_ROWS, -2:]
        values, counts = np.unique(tails[tails[:, 0] == tails[:, 1], 1], return_counts=True)
        if len(values) and counts.max() * 2 > len(tails):
            self.padding, self.guessed = float(values[counts.argmax()]), True

    def _remember(self, piece: Piece) -> None:
        import numpy as np

        assert self.values is not None
        flat = piece.values.reshape(-1)
        if piece.missing is not None:
            flat = flat[~piece.missing]
        if flat.dtype.kind not in "fiub":
            self.values = None
            return
        seen = np.unique(flat[np.isfinite(flat)] if flat.dtype.kind == "f" else flat)
        self.values.update(seen[: _MOST_CLASSES + 1].tolist())
        if len(self.values) > _MOST_CLASSES:
            self.values = None

    @property
    def mean(self) -> float | None:
        return self.total / self.numbers if self.numbers else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation; None where the squares are too large to be added."""
        if not self.numbers or self.squares > 1e300 or not math.isfinite(self.total):
            return None
        return math.sqrt(max(0.0, self.squares / self.numbers - (self.total / self.numbers) ** 2))

    @property
    def variety(self) -> float:
        """How many different rows this column alone could make, roughly."""
        if self.column.scalar and self.values is not None:
            return max(1, len(self.values))
        return self._variety if not self.column.scalar else _MOST_CLASSES

    @property
    def telling(self) -> bool:
        """Whether a row in which this column is blank says nothing: so where that is rare."""
        return not self.column.scalar and (self.zero.count + self.empty.count + self.missing.count) * 2 < self.rows

    def _sample_variety(self, piece: Piece) -> None:
        """Take rows for drawn from few kinds where the first ones repeat a lot; otherwise every row may be its own."""
        import numpy as np

        kinds = len(np.unique(piece_keys(piece)[:_GUESS_ROWS]))
        self._variety = float(kinds) if kinds < 0.3 * min(piece.rows, _GUESS_ROWS) else 1e30


def _where(flags: Array, start: int) -> Array:
    import numpy as np

    return np.flatnonzero(flags) + start


def _any(flags: Array, piece: Piece) -> Array:
    """Rows in which at least one value is flagged."""
    import numpy as np

    found = np.asarray(flags.any(axis=1) if piece.lengths is None else _counts(flags, piece.lengths) > 0)
    return found if piece.missing is None else found & ~piece.missing


def _counts(flags: Array, lengths: Array) -> Array:
    """How many values of each ragged row are flagged."""
    import numpy as np

    sums, ends = np.append(0, np.cumsum(flags, dtype=np.int64)), np.append(0, np.cumsum(lengths))
    return np.asarray(sums[ends[1:]] - sums[ends[:-1]])


def _all_equal(piece: Piece, value: float) -> Array:
    """Rows in which every value is this one; long rows are first judged by a few of their values."""
    import numpy as np

    if piece.lengths is not None:
        return np.asarray((_counts(piece.values == value, piece.lengths) == piece.lengths) & (piece.lengths > 0))
    width = piece.values.shape[1]
    if width == 0:
        return np.zeros(piece.rows, bool)
    flags = np.asarray(piece.values[:, width // 2] == value)
    if piece.missing is not None:
        flags &= ~piece.missing
    for place in {0, width - 1, width // 3, 2 * width // 3} if flags.any() else ():
        flags &= piece.values[:, place] == value
    if flags.any():
        flags[flags] = (piece.values[flags] == value).all(axis=1)
    return flags
