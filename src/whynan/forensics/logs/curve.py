"""A curve of any length in bounded memory: neighbours are joined, their lowest and highest values and the non-finite ones are kept."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Stretch:
    """Some values that follow each other."""

    first: int
    last: int
    low: float = math.inf
    high: float = -math.inf
    bad_at: int | None = None  # the first position of a non-finite value

    def take(self, position: int, value: float) -> None:
        self.last = position
        if not math.isfinite(value):
            self.bad_at = position if self.bad_at is None else self.bad_at
            return
        self.low = min(self.low, value)
        self.high = max(self.high, value)

    def join(self, other: Stretch) -> None:
        self.last = other.last
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.bad_at = other.bad_at if self.bad_at is None else self.bad_at

    @property
    def finite(self) -> bool:
        return self.low <= self.high


class Curve:
    """The shape of a series.

    >>> curve = Curve(4)
    >>> for step in range(100): curve.add(step, float("nan") if step == 50 else step)
    >>> len(curve.stretches) <= 4, curve.stretches[-1].high, [s.bad_at for s in curve.stretches if s.bad_at]
    (True, 99, [50])
    """

    def __init__(self, most: int = 1024) -> None:
        self.stretches: list[Stretch] = []
        self._most, self._each, self._room = most, 1, 0

    def add(self, position: int, value: float) -> None:
        """Take the next value."""
        if self._room == 0:
            if len(self.stretches) >= self._most:
                self._halve()
            self.stretches.append(Stretch(position, position))
            self._room = self._each
        self.stretches[-1].take(position, value)
        self._room -= 1

    def _halve(self) -> None:
        pairs = zip(self.stretches[::2], self.stretches[1::2], strict=False)
        kept = []
        for left, right in pairs:
            left.join(right)
            kept.append(left)
        if len(self.stretches) % 2:
            kept.append(self.stretches[-1])
        self.stretches = kept
        self._each *= 2

    def at(self, position: int) -> Stretch | None:
        """Return the last finite stretch that begins at or before a position."""
        return next((s for s in reversed(self.stretches) if s.first <= position and s.finite), None)
