"""Interval arithmetic for the common operations of an exported graph: one range for all values of a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from whynan.records import number

INF = math.inf


@dataclass(frozen=True, slots=True)
class Interval:
    """All values lie between `low` and `high`.

    >>> Interval(-1, 2) * Interval(3, 4)
    [-4, 8]
    """

    low: float
    high: float

    def __repr__(self) -> str:
        return f"[{number(self.low)}, {number(self.high)}]"

    def __add__(self, other: Interval) -> Interval:
        return made(self.low + other.low, self.high + other.high)

    def __neg__(self) -> Interval:
        return Interval(-self.high, -self.low)

    def __sub__(self, other: Interval) -> Interval:
        return self + -other

    def __mul__(self, other: Interval) -> Interval:
        return spanning(_times(a, b) for a in (self.low, self.high) for b in (other.low, other.high))

    def __truediv__(self, other: Interval) -> Interval:
        if 0 in other:
            return ANY if other.low < 0 < other.high or self.low < 0 < self.high else _by_edge_of_zero(self, other)
        return self * Interval(1 / other.high, 1 / other.low)

    def __or__(self, other: Interval) -> Interval:
        return Interval(min(self.low, other.low), max(self.high, other.high))

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def size(self) -> float:
        """The largest absolute value."""
        return max(abs(self.low), abs(self.high))

    def through(self, function: Callable[[float], float]) -> Interval:
        """Apply a function that never falls."""
        return made(_safely(function, self.low), _safely(function, self.high))


ANY = Interval(-INF, INF)


def made(low: float, high: float) -> Interval:
    """Make an interval; what is not a number is everything."""
    return ANY if math.isnan(low) or math.isnan(high) else Interval(low, high)


def spanning(values: object) -> Interval:
    """Return the smallest interval around some values."""
    found = list(values)  # type: ignore[call-overload]
    return ANY if any(math.isnan(v) for v in found) else Interval(min(found), max(found))


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b  # an infinite end means "arbitrarily large", not infinity itself


def _by_edge_of_zero(top: Interval, bottom: Interval) -> Interval:
    """Divide by something that reaches 0 from one side, with a dividend of one sign."""
    far = bottom.high if bottom.high > 0 else bottom.low
    if far == 0:
        return ANY
    ends = [top.low / far, top.high / far, math.copysign(INF, far) * (1 if top.high > 0 else -1)]
    return spanning(ends)


def _safely(function: Callable[[float], float], value: float) -> float:
    try:
        return function(value)
    except OverflowError:
        return INF
    except ValueError:
        return -INF if value <= 0 else INF


def square(x: Interval) -> Interval:
    """Square a value: never negative."""
    return power(x, 2)


def power(x: Interval, exponent: float) -> Interval:
    """Raise to a constant power."""
    ends = [_power(x.low, exponent), _power(x.high, exponent)]
    if exponent == int(exponent) and exponent % 2 == 0:
        if exponent < 0 and 0 in x:
            return Interval(min(ends), INF)
        return Interval(0.0 if 0 in x else min(ends), max(ends))
    if exponent == int(exponent):
        return ANY if exponent < 0 and 0 in x else spanning(ends)
    if x.low < 0:
        return ANY
    return Interval(min(ends), INF if exponent < 0 and x.low == 0 else max(ends))


def _power(value: float, exponent: float) -> float:
    try:
        made = value**exponent
    except (OverflowError, ZeroDivisionError):
        return INF
    return made if isinstance(made, float | int) else math.nan


def absolute(x: Interval) -> Interval:
    """Return the range of the absolute value."""
    return Interval(0.0 if 0 in x else min(abs(x.low), abs(x.high)), x.size)


def clamp(x: Interval, low: float | None, high: float | None) -> Interval:
    """Cut a range at both ends."""
    least, most = -INF if low is None else low, INF if high is None else high
    return Interval(min(max(x.low, least), most), min(max(x.high, least), most))


def gelu(x: Interval) -> Interval:
    """Bound the functions that look like x with a dip below zero (GELU, SiLU, Mish)."""
    return Interval(-0.31 if x.low < 0 else 0.0, max(x.high, 0.0))


def softmax(x: Interval, size: int) -> Interval:
    """Bound a softmax over `size` values: the smallest share is exp(low - high) of them."""
    spread = x.high - x.low
    if math.isnan(spread) or spread == INF:
        return Interval(0.0, 1.0)
    least = math.exp(-min(spread, 800.0))
    return Interval(least / (least + max(size - 1, 0)) if least > 1e-38 else 0.0, 1.0)


def matmul(x: Interval, y: Interval, size: int) -> Interval:
    """Bound a sum of `size` products."""
    one = x * y
    return Interval(_times(one.low, size), _times(one.high, size))


def linear(x: Interval, weight: torch.Tensor, bias: torch.Tensor | None) -> Interval:
    """Bound an affine map by the actual sums of its positive and negative weights.

    >>> linear(Interval(0, 1), torch.tensor([[2.0, -3.0]]), None)
    [-3, 2]
    """
    flat = weight.detach().double().flatten(1) if weight.dim() > 1 else weight.detach().double().unsqueeze(0)
    up, down = flat.clamp_min(0).sum(1), flat.clamp_max(0).sum(1)
    if not (math.isfinite(x.low) and math.isfinite(x.high)):
        return ANY
    high, low = up * x.high + down * x.low, up * x.low + down * x.high
    if bias is not None:
        high, low = high + bias.detach().double(), low + bias.detach().double()
    return made(float(low.min()), float(high.max()))


def normalised(size: int, weight: Interval, bias: Interval) -> Interval:
    """Bound what a normalisation over `size` values gives: no value is further than sqrt(size) deviations from the mean."""
    edge = math.sqrt(max(size - 1, 1))
    return Interval(-edge, edge) * weight + bias
