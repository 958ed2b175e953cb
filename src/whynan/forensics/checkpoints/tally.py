"""Count what is in a tensor, piece by piece: NaN, infinities, zeros, and the range of the finite numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from whynan.forensics.checkpoints.dtypes import Format, Sort, value
from whynan.forensics.checkpoints.kernels import Extremes, Kernel
from whynan.records import TensorStats


@dataclass(slots=True)
class Tally:
    """What was counted so far; two of them add up."""

    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    min: float | None = None
    max: float | None = None

    def add(self, other: Tally, times: int = 1) -> None:
        """Count another one in, so many times."""
        self.nan += other.nan * times
        self.posinf += other.posinf * times
        self.neginf += other.neginf * times
        self.zeros += other.zeros * times
        for number in (other.min, other.max):
            if number is not None:
                self.min = number if self.min is None else min(self.min, number)
                self.max = number if self.max is None else max(self.max, number)

    def stats(self, name: str, dtype: str, shape: tuple[int, ...]) -> TensorStats:
        """The record for a tensor."""
        return TensorStats(name, dtype, shape, self.nan, self.posinf, self.neginf, self.zeros, self.min, self.max)


def count_piece(kernel: Kernel, form: Format, piece: memoryview) -> Tally:
    """Count one piece of whole numbers.

    **Cost:** four reductions over numbers in the cache; one more where there are zeros, five where there is damage.
    """
    if not len(piece):
        return Tally()
    if form.sort is Sort.TABLE:
        return _by_table(form, kernel.histogram(piece))
    seen = kernel.extremes(piece, form.width)
    if form.sort is Sort.FLOAT:
        return _count_floats(kernel, form, piece, seen)
    low, high = (seen.low, seen.high) if form.sort is Sort.SIGNED else (seen.ulow, seen.uhigh)
    return Tally(zeros=kernel.equal(piece, form.width, 0) if low <= 0 <= high else 0, min=float(low), max=float(high))


def _count_floats(kernel: Kernel, form: Format, piece: memoryview, seen: Extremes) -> Tally:
    sign = 1 << (form.width * 8 - 1)
    if seen.high <= form.top and seen.uhigh - sign <= form.top:
        return _count_finite(kernel, form, piece, seen)
    if form.table:
        return _by_table(form, kernel.histogram(piece))
    infinity = form.top + 1
    tally = Tally(
        nan=kernel.above(piece, form.width, infinity),
        posinf=kernel.equal(piece, form.width, infinity),
        neginf=kernel.equal(piece, form.width, infinity | sign),
    )
    kept = kernel.keep(piece, form.width, form.top)
    if len(kept):
        tally.add(_count_finite(kernel, form, kept, kernel.extremes(kept, form.width)))
    return tally


def _count_finite(kernel: Kernel, form: Format, piece: memoryview, seen: Extremes) -> Tally:
    sign = 1 << (form.width * 8 - 1)
    some_negative, some_positive = seen.low < 0, seen.high >= 0
    least = -value(form, seen.uhigh - sign) if some_negative else value(form, seen.ulow)
    most = value(form, seen.high) if some_positive else -value(form, seen.ulow - sign)
    zeros = kernel.equal(piece, form.width, 0) if not seen.ulow else 0
    if seen.low == -sign:
        zeros += kernel.equal(piece, form.width, sign)
    return Tally(zeros=zeros, min=least + 0.0, max=most + 0.0)


def _by_table(form: Format, counts: list[int]) -> Tally:
    tally = Tally()
    for byte, times in enumerate(counts):
        for number in form.table[byte] if times else ():
            tally.add(_one(number), times)
    return tally


def _one(number: float) -> Tally:
    if math.isnan(number):
        return Tally(nan=1)
    if math.isinf(number):
        return Tally(posinf=int(number > 0), neginf=int(number < 0))
    return Tally(zeros=int(number == 0), min=number + 0.0, max=number + 0.0)
