"""Spikes of the loss and the gradient norm, by a statistic that no NaN and no single spike can poison.

A value is compared with the median of the last values (the level). How far values usually lie from their level is
known from the quantiles of the last distances: the tail is continued from them, so a noisy curve gets a wide limit and
a smooth one a narrow limit. Everything is a ratio: a curve in other units gets the same answers.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from whynan.records import number

_LEVEL = 17  # values whose median is the level: short, so that it follows a falling loss
_MEMORY = 256  # distances remembered: a few spikes among them move no quantile up to 0.95
_WARM = 16  # distances needed before quantiles mean anything; until then only absurd values alarm
_ABSURD = 1e3  # times the second largest of the last values: too much for any healthy curve, known without statistics
_ABSURD_ANYWAY = 1e6  # times the level: absurd also of a value that may be of a rarer kind (another task), where few are known or one was like it
_ABSURD_AT_ONCE = 1e9  # the same with only one or two values to compare with; this many times the level is never usual
_ABSURD_AFTER_ZEROS = 1e6  # a curve of exact zeros has no scale: the one absolute number here
_TAIL_LEAST, _TAIL_MOST = 2.25, 6.0  # bounds of q95 over q75 of the distances: 1.7 is a bell curve, 4.3 a log-normal one
_RARE = 4.0  # times the third largest distance: a tail the quantiles do not show; two spikes do not move it
_DELAY = 8  # steps before a distance counts: a curve that climbs step by step must not widen its own limit
_ACCEPT = 5  # spikes in a row that make a new normal: a new rate, new data
_OFTEN = 0.04  # as many of the last values as far out are usual: batches of another kind that come back
_AS_FAR = 0.5  # of a distance: those of batches of one kind differ by less than twice
_LARGEST = 1e300  # larger values are taken for this: sums and products of it stay finite


@dataclass(frozen=True, slots=True)
class Spike:
    """A value far above what its curve did before, or absurdly large below zero."""

    step: int
    value: float
    level: float  # the median of the values before it
    limit: float  # what would just have passed
    row: int  # 1 for the first of several in a row
    alone: bool = True  # enough values are known, and none was like it

    @property
    def thousandfold(self) -> bool:
        """Whether it is a thousand times its level."""
        return abs(self.value) > _ABSURD * abs(self.level)

    @property
    def absurd(self) -> bool:
        """Whether no healthy curve does this."""
        return self.thousandfold and (self.alone or abs(self.value) > _ABSURD_ANYWAY * abs(self.level))

    def text(self, name: str) -> str:
        """Say the spike in one line.

        >>> Spike(812, 4.5e12, 0.05, 0.4, 1).text("loss")
        'loss 4.5e+12 at step 812; the last values were about 0.05, up to 0.4 would be usual'
        """
        usual = f", up to {number(self.limit)} would be usual" if self.value > self.limit else ""
        return f"{name} {number(self.value)} at step {self.step}; the last values were about {number(self.level)}{usual}"


class SpikeWatch:
    """Watches one curve, one number per optimizer step.

    >>> watch = SpikeWatch()
    >>> [watch.see(step, 0.05) for step in range(4)]
    [None, None, None, None]
    >>> watch.see(4, 4.5e12).level
    0.05

    A non-finite number is not a spike and leaves no trace. A spike is not taken into the level; after five in a row
    the curve has moved and is learnt anew, and one is usual that 4 % of the last 256 values were like. `least` is the
    smallest rise, as a part of the level, worth a word.
    Cost: about 3 microseconds a number, and the memory of some 300 numbers, twice.
    """

    def __init__(self, least: float = 0.5) -> None:
        self._least = least
        self._recent: deque[float] = deque()
        self._recent_sorted: list[float] = []
        self._fresh: deque[float] = deque()
        self._distances: deque[float] = deque()
        self._distances_sorted: list[float] = []
        self._scale = 0.0  # of the distances, remembered while a curve stands still at zero
        self._pending: list[float] = []
        self._far: deque[tuple[int, float]] = deque()  # which of the values were above their limit, and how far from their level
        self._seen = 0  # how many values there were

    def see(self, step: int, value: float) -> Spike | None:
        """Take the next number; answer with a spike if it is one."""
        if not -_LARGEST <= value <= _LARGEST:  # also true of a NaN
            if not math.isfinite(value):
                return None
            value = math.copysign(_LARGEST, value)
        self._seen += 1
        if not self._recent:
            self._enter(value)
            return None
        level = self._recent_sorted[len(self._recent_sorted) // 2]
        limit = self._limit(level)
        size = abs(value)
        if value - level <= limit and (size <= _ABSURD * abs(level) or size <= self._absurd()):  # the first is the cheaper way to the same answer
            self._pending.clear()
            self._remember(abs(value - level))
            self._enter(value)
            return None
        return self._spike(step, value, level, limit)

    @property
    def ceiling(self) -> float:
        """The size above which the next value is certainly worth a look: what no statistics are needed for."""
        return self._absurd() if self._recent else math.inf

    def _limit(self, level: float) -> float:
        """Return how far above its level a value may lie."""
        ordered = self._distances_sorted
        size = len(ordered)
        if size < _WARM:
            return math.inf
        usual, far = ordered[size * 3 // 4], ordered[size * 19 // 20]
        if far > 0.0:
            self._scale = max(far, 0.999 * self._scale)
            tail = min(max(far / usual, _TAIL_LEAST), _TAIL_MOST) if usual > 0.0 else _TAIL_MOST
            return max(far * tail * tail, _RARE * ordered[-3], self._least * abs(level))
        return max(_TAIL_MOST**2 * self._scale, self._least * abs(level)) or _ABSURD_AFTER_ZEROS

    def _absurd(self) -> float:
        """Return the size no value may have, whatever the statistics say."""
        ordered = self._recent_sorted
        ends = sorted((abs(ordered[0]), abs(ordered[-1]), abs(ordered[1 % len(ordered)]), abs(ordered[len(ordered) - 2])))
        if len(ordered) < 3:
            return _ABSURD_AT_ONCE * ends[-1] or _ABSURD_AFTER_ZEROS
        return _ABSURD * ends[-2] or _ABSURD_AFTER_ZEROS

    def _comes_back(self, distance: float, level: float) -> tuple[bool, int]:
        """Take the distance of a value above its limit; return whether such values come so often that they are usual, and how many there were."""
        while self._far and self._far[0][0] <= self._seen - _MEMORY:
            self._far.popleft()
        alike = sum(far / distance >= _AS_FAR for _, far in self._far)
        self._far.append((self._seen, distance))
        often = alike >= max(_ACCEPT, int(_OFTEN * min(self._seen, _MEMORY)))
        return often and not abs(distance) > _ABSURD_AT_ONCE * abs(level) > 0.0, alike

    def _spike(self, step: int, value: float, level: float, limit: float) -> Spike | None:
        usual, (known, alike) = min(level + limit, self._absurd()), self._comes_back(value - level, level)
        self._pending.append(value)
        row = len(self._pending)
        if limit < math.inf:
            self._remember(limit)  # not the spike itself: frequent spikes widen the limit, a single one does not
        if row >= _ACCEPT:
            self._begin_again()
        return None if known else Spike(step, value, level, usual, row, self._seen > _WARM and not alike)

    def _begin_again(self) -> None:
        pending, self._pending = self._pending, []
        for store in (self._fresh, self._recent, self._recent_sorted, self._distances, self._distances_sorted):
            store.clear()
        for value in pending:
            self._enter(value)

    def _enter(self, value: float) -> None:
        _push(self._recent, self._recent_sorted, value, _LEVEL)

    def _remember(self, distance: float) -> None:
        self._fresh.append(distance)
        if len(self._fresh) <= min(_DELAY, len(self._distances) // 4):
            return
        distance = self._fresh.popleft()
        _push(self._distances, self._distances_sorted, distance, _MEMORY)


def _push(queue: deque[float], ordered: list[float], value: float, size: int) -> None:
    """Put a value into a window that is kept both in order of time and of size."""
    if len(queue) >= size:
        del ordered[bisect_left(ordered, queue.popleft())]
    queue.append(value)
    insort(ordered, value)
