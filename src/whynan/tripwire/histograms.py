"""How the values of a tensor are spread: few bars, made only when a step was bad."""

from __future__ import annotations

import math

import torch

from whynan.records import Histogram
from whynan.tripwire.values import plain, stats

BARS = 24
_WIDE = 1e3  # largest over smallest magnitude from which bars are decades


def histogram(name: str, tensor: torch.Tensor) -> Histogram | None:
    """Count the values of a tensor in bars; None where there is nothing to spread.

    >>> histogram("x", torch.tensor([0.0, 1.0, 2.0, 2.0])).counts[-1]
    2
    """
    dense = plain(tensor.detach())
    if dense is None or dense.numel() < 2 or not dense.is_floating_point() or dense.device.type == "meta":
        return None
    seen = stats(name, dense)
    values = dense.flatten().to(torch.float64 if dense.device.type == "cpu" else torch.float32)
    finite = values[torch.isfinite(values)]
    sizes = finite[finite != 0].abs()
    wide = bool(sizes.numel()) and float(sizes.max()) > _WIDE * float(sizes.min())
    edges, counts = _decades(finite) if wide else _even(finite)
    return Histogram(name, seen.dtype, tuple(edges), tuple(counts), wide, seen.zeros, seen.nan, seen.posinf, seen.neginf)


def _even(finite: torch.Tensor) -> tuple[list[float], list[int]]:
    if not finite.numel():
        return [], []
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        return [low, high], [finite.numel()]
    width = (high - low) / BARS
    places = ((finite - low) / width).long().clamp(0, BARS - 1)
    return [low + i * width for i in range(BARS)] + [high], torch.bincount(places, minlength=BARS).tolist()


def _decades(finite: torch.Tensor) -> tuple[list[float], list[int]]:
    """Bars of whole powers of ten, the negative ones from large to small, then the positive ones from small to large."""
    sizes = finite[finite != 0].abs()
    low, high = math.floor(math.log10(float(sizes.min()))), math.floor(math.log10(float(sizes.max())))
    each = max(1, math.ceil((high - low + 1) / (BARS // 2)))  # powers of ten to a bar
    bars = (high - low) // each + 1
    powers = [low + each * i for i in range(bars + 1)]
    edges: list[float] = []
    counts: list[int] = []
    for sign in (-1, 1):
        part = finite[finite * sign > 0].abs()
        if part.numel():
            places = ((part.log10().floor().long() - low) // each).clamp(0, bars - 1)
            counted = torch.bincount(places, minlength=bars).tolist()
            marks = [sign * _power(p) for p in powers]
            edges += marks[::sign] if not edges else marks
            counts += counted[::sign] if sign < 0 else ([0] if counts else []) + counted
    return edges, counts


def _power(exponent: int) -> float:
    """Ten to a power, at most the largest float."""
    return math.pow(10.0, min(exponent, 308))
