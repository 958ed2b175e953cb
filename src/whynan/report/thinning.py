"""Fewer points for a chart, without losing what one looks for: the extremes of every stretch, and each gap."""

from __future__ import annotations

from whynan.report.reading import FINITE, MISSING, SERIES, Curves

ENOUGH = 2400  # points up to which nothing is left out
STRETCHES = 400


def thinned(curves: Curves, always: frozenset[int] = frozenset()) -> list[int]:
    """Return the places of the points to draw: of each stretch the ends, per series the smallest, the largest and the first that is not finite.

    Steps in `always` stay, with their neighbours.
    """
    total = len(curves)
    if total <= ENOUGH:
        return list(range(total))
    kept = {0, total - 1}
    for number in range(STRETCHES):
        kept |= _stretch(curves, total * number // STRETCHES, total * (number + 1) // STRETCHES)
    for place, step in enumerate(curves.steps):
        if step in always:
            kept |= {max(place - 1, 0), place, min(place + 1, total - 1)}
    return sorted(kept)


def _stretch(curves: Curves, start: int, end: int) -> set[int]:
    kept = {start, end - 1}
    for name in SERIES:
        values, kinds = curves.values[name], curves.kinds[name]
        finite = [i for i in range(start, end) if kinds[i] == FINITE]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        gap = next((i for i in range(start, end) if kinds[i] not in (FINITE, MISSING)), None)
        if gap is not None:
            kept.add(gap)
    return kept
