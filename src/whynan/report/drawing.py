"""Small pictures as numbers for the template: the way of the damage, histograms, sparklines. The template draws them as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from whynan.records import Histogram, Stage, count, number

ROW, LANE, EDGE = 48, 16, 14  # of the way of the damage, in pixels
WIDE, HIGH = 480, 96  # of a histogram
_LEAST = 2.0  # height of a bar that counts anything


@dataclass(frozen=True, slots=True)
class Dot:
    """One operation in the picture of the way."""

    x: int
    y: int
    role: str


@dataclass(frozen=True, slots=True)
class Way:
    """The picture of the way."""

    width: int
    height: int
    dots: tuple[Dot, ...]
    lines: tuple[tuple[str, str], ...]  # path data, class


def way(stages: Sequence[Stage]) -> Way:
    """Lay the stages out one under the other; the arguments of the origin start in lanes of their own and join it."""
    first = next((n for n, s in enumerate(stages) if s.role != "argument"), 0)
    dots = [Dot(EDGE + LANE * (n if n < first else 0), ROW * n + ROW // 2, s.role) for n, s in enumerate(stages)]
    lines = [(_joining(dots[n], dots[first]), "finite") for n in range(first)]
    for before, after, stage, target in zip(dots[first:], dots[first + 1 :], stages[first:], stages[first + 1 :], strict=False):
        kind = "finite" if stage.role == "forward" else "gap" if target.left_out else "damage"
        lines.append((f"M{before.x} {before.y}V{after.y}", kind))
    return Way(EDGE * 2 + LANE * max(first - 1, 0), ROW * len(stages), tuple(dots), tuple(lines))


def _joining(start: Dot, end: Dot) -> str:
    if start.x == end.x:
        return f"M{start.x} {start.y}V{end.y}"
    return f"M{start.x} {start.y}V{end.y - ROW // 2}C{start.x} {end.y - 6} {end.x} {end.y - 18} {end.x} {end.y}"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar of a histogram."""

    x: float
    y: float
    width: float
    height: float
    title: str


def bars(histogram: Histogram) -> list[Bar]:
    """Lay the bars of a histogram out; a single value is said in words."""
    if len(histogram.counts) < 2 or len(histogram.edges) != len(histogram.counts) + 1:
        return []
    width, top = WIDE / len(histogram.counts), max(max(histogram.counts), 1)
    found = []
    for n, counted in enumerate(histogram.counts):
        if counted > 0:
            height = max(HIGH * counted / top, _LEAST)
            title = f"{number(histogram.edges[n])} to {number(histogram.edges[n + 1])}: {count(counted)}"
            found.append(Bar(round(n * width + 0.5, 1), round(HIGH - height, 1), round(max(width - 1, 1), 1), round(height, 1), title))
    return found


def sparkline(points: Sequence[tuple[int, float]], wide: int = 84, high: int = 18) -> str:
    """Return the points of a polyline, by the logarithm of the values; nothing for fewer than two."""
    known = [(step, math.log10(abs(value))) for step, value in points if math.isfinite(value) and value != 0]
    if len(known) < 2:
        return ""
    first, last = known[0][0], known[-1][0]
    low, high_value = min(v for _, v in known), max(v for _, v in known)
    across, up = max(last - first, 1), max(high_value - low, 1e-9)
    return " ".join(f"{2 + (wide - 4) * (s - first) / across:.1f},{high - 2 - (high - 4) * (v - low) / up:.1f}" for s, v in known)
