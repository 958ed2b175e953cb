"""Rows that something was found in: counted, the first few kept, and counted by the batches they would meet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whynan.forensics.data.tables import Array

FIRST = 8  # rows that are named


class Marks:
    """Row numbers, added in ascending order, of which only counts and the first few are kept.

    >>> import numpy
    >>> marks = Marks(batch=4)
    >>> marks.add(numpy.array([1, 4, 5])); marks.add(numpy.array([6, 7, 8]))
    >>> marks.count, marks.met, marks.filled(total=9), marks.first_filled
    (6, 3, 2, 1)
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.count = 0
        self.first: list[int] = []
        self.met = 0  # batches with at least one of them
        self.first_filled = -1
        self._filled = 0  # batches made of nothing else
        self._open = (-1, 0)  # the batch that may still grow, and how many it has

    def add(self, rows: Array) -> None:
        """Take more rows."""
        if not len(rows):
            return
        import numpy as np

        self.count += len(rows)
        self.first += [int(r) for r in rows[: FIRST - len(self.first)]]
        batches, counts = np.unique(rows // self.batch, return_counts=True)
        self.met += len(batches)
        if int(batches[0]) == self._open[0]:
            self.met -= 1
            counts[0] += self._open[1]
        else:
            self._close(self._open, self.batch)
        full = batches[:-1][counts[:-1] == self.batch]
        if len(full) and self.first_filled < 0:
            self.first_filled = int(full[0])
        self._filled += len(full)
        self._open = (int(batches[-1]), int(counts[-1]))

    def _close(self, batch: tuple[int, int], size: int) -> None:
        if batch[0] >= 0 and batch[1] == size:
            self._filled += 1
            if self.first_filled < 0:
                self.first_filled = batch[0]

    def filled(self, total: int, least: int = 1) -> int:
        """Return how many batches hold nothing else, once all rows are known; a last batch of fewer than `least` rows does not count."""
        number, _ = self._open
        size = min(self.batch, total - number * self.batch)
        if number >= 0 and size >= least:
            self._close(self._open, size)
        self._open = (-1, 0)
        return self._filled


def batches_in(rows: int, batch: int) -> int:
    """Return how many batches there are, the last one perhaps short."""
    return -(-rows // batch)


def met_when_shuffled(total: int, marked: int, batch: int) -> float:
    """Return how many batches are expected to hold at least one marked row.

    >>> round(met_when_shuffled(6400, 100, 64), 1)
    63.7
    """
    return sum(times * (1 - _share(total - marked, total, size)) for times, size in _sizes(total, batch))


def filled_when_shuffled(total: int, marked: int, batch: int, least: int = 1) -> float:
    """Return how many batches of at least so many rows are expected to hold nothing but marked rows.

    >>> filled_when_shuffled(128, 64, 64) < 1e-30
    True
    """
    return sum(times * _share(marked, total, size) for times, size in _sizes(total, batch) if size >= least)


def _sizes(total: int, batch: int) -> tuple[tuple[int, int], ...]:
    """The full batches, and the one that is left over."""
    return (total // batch, batch), (int(total % batch > 0), total % batch)


def _share(chosen: int, total: int, size: int) -> float:
    """The share of all draws of this size that take from the chosen rows only."""
    return math.exp(_log_choose(chosen, size) - _log_choose(total, size)) if size <= total else 0.0


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) if 0 <= k <= n else -math.inf
