"""A curve for the terminal: braille dots, 78 columns, a logarithmic axis where the range asks for one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from whynan.forensics.logs.curve import Stretch
from whynan.forensics.logs.names import Role
from whynan.forensics.logs.series import Series
from whynan.records import count, number

_WIDTH, _HEIGHT = 66, 9  # characters of the field, each 2 by 4 dots
_LABEL = 9
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_LEAST, _MOST = 1e-280, 1e280  # ends of a logarithmic axis: there is room around them
_WIDE = 30.0  # highest over lowest from which on an axis is logarithmic


@dataclass(frozen=True, slots=True)
class Axis:
    """The vertical axis."""

    low: float
    high: float
    log: bool

    @classmethod
    def over(cls, stretches: Sequence[Stretch], wide: float = _WIDE) -> Axis:
        """Return an axis that shows every finite value, logarithmic where the highest is more than `wide` times the lowest."""
        lows, highs = [s.low for s in stretches], [s.high for s in stretches]
        low, high = min(lows, default=0.0), max(highs, default=1.0)
        if low > 0.0 and high / wide > low:
            return cls(max(low, _LEAST), min(high, _MOST), True)
        return cls(low, high if high > low else low + (abs(low) or 1.0), False)

    def share(self, value: float) -> float:
        """Return where a value lies, from 0 at the bottom to 1 at the top."""
        if self.log:
            low, high = math.log(self.low), math.log(self.high)
            return min(1.0, max(0.0, (math.log(max(value, _LEAST)) - low) / (high - low)))
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)  # halves: the difference of two large numbers may not be finite

    def value(self, share: float) -> float:
        """Return the value at a place."""
        if self.log:
            return math.exp(math.log(self.low) * (1 - share) + math.log(self.high) * share)
        return self.low * (1 - share) + self.high * share


def draw(curves: Sequence[Series], main: Series | None) -> str:
    """Draw the loss, or what stands for it; an `x` above the field marks where a value is not finite."""
    series = main or next((s for s in curves if s.naming.role in (Role.NORM, Role.LOSS)), curves[0] if curves else None)
    if series is None or not series.curve.stretches:
        return ""
    stretches = [s for s in series.curve.stretches if s.finite]
    axis = Axis.over(stretches)
    first = min(s.first for s in series.curve.stretches)
    last = max(max(s.last for s in series.curve.stretches), first + 1)
    scale = ", log axis" if axis.log else ""
    marks = "x not finite" if series.bad else ""
    title = f"{'':{_LABEL}} {series.name[:40]}{scale}"
    lines = [title + marks.rjust(_LABEL + 2 + _WIDTH - len(title)) if marks else title]
    if series.bad:
        lines.append(f"{'':{_LABEL}} |{_crosses(series.curve.stretches, first, last)}".rstrip())
    field = _field(stretches, axis, first, last)
    lines += [f"{_label(axis, row)} |{''.join(field[row])}".rstrip() for row in range(_HEIGHT)]
    lines.append(f"{'':{_LABEL}} +{'-' * _WIDTH}")
    lines.append(f"{'':{_LABEL}}  {_ends(first, last)}")
    return "\n".join(lines)


def _label(axis: Axis, row: int) -> str:
    shown = row in (0, _HEIGHT // 2, _HEIGHT - 1)
    return f"{number(float(f'{axis.value(1 - row / (_HEIGHT - 1)):.3g}')) if shown else '':>{_LABEL}}"


def _crosses(stretches: Sequence[Stretch], first: int, last: int) -> str:
    marks = [" "] * _WIDTH
    for stretch in stretches:
        if stretch.bad_at is not None:
            end = stretch.last if not stretch.finite else stretch.bad_at
            for column in range(_column(stretch.bad_at, first, last, _WIDTH), _column(end, first, last, _WIDTH) + 1):
                marks[column] = "x"
    return "".join(marks)


def _column(position: int, first: int, last: int, width: int) -> int:
    return min(width - 1, max(0, (position - first) * width // (last - first + 1)))


def _field(stretches: Sequence[Stretch], axis: Axis, first: int, last: int) -> list[list[str]]:
    cells = [[0] * _WIDTH for _ in range(_HEIGHT)]
    for stretch in stretches:
        column = _column(stretch.first, first, last, 2 * _WIDTH)
        low, high = (round(axis.share(v) * (4 * _HEIGHT - 1)) for v in (stretch.low, stretch.high))
        for dot in range(low, high + 1):
            row = 4 * _HEIGHT - 1 - dot
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    return [[chr(0x2800 + c) if c else " " for c in row] for row in cells]


def _ends(first: int, last: int) -> str:
    middle = count((first + last) // 2)
    left, right = count(first), count(last)
    return f"{left:<{_WIDTH // 2 - len(middle) // 2}}{middle}".ljust(_WIDTH - len(right)) + right
