"""How far the search may go: the ranges of the float inputs, or a neighbourhood of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from whynan.probing.inputs import Input, Role

RADIUS = 0.5  # of a weight tensor's largest value: how far the search moves a weight
FAR = 10.0  # and how far in the end


@dataclass(slots=True)
class Box:
    """The variables of a search: a point, and how far each coordinate may go."""

    low: list[torch.Tensor]
    high: list[torch.Tensor]
    start: list[torch.Tensor]

    def project(self, point: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Move a point into the box."""
        return [torch.minimum(torch.maximum(p, lo), hi) for p, lo, hi in zip(point, self.low, self.high, strict=True)]


def is_free(given: Input) -> bool:
    """Whether an input is moved by gradient."""
    return given.role is Role.FLOATS


def like(value: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Let a value need a gradient where the one it stands for does."""
    return value.requires_grad_() if old.requires_grad and value.is_floating_point() else value


def input_box(inputs: Sequence[Input], factor: float) -> Box | None:
    """Make the box of the float inputs; a factor above 1 leaves their ranges."""
    free = [i for i in inputs if is_free(i)]
    if not free:
        return None
    edges = [_wider(i.low, i.high, factor) for i in free]
    start = [i.value.detach().clone() for i in free]
    low, high = ([_full(s, edge[side]) for s, edge in zip(start, edges, strict=True)] for side in (0, 1))
    return Box(low, high, start)


def _full(like: torch.Tensor, value: float) -> torch.Tensor:
    most = torch.finfo(like.dtype).max
    return torch.full_like(like, min(max(value, -most), most))


def _wider(low: float, high: float, factor: float) -> tuple[float, float]:
    if factor == 1.0:
        return low, high
    size = factor * max(abs(low), abs(high), 1e-3)
    return -size, size


def weight_box(weights: Sequence[tuple[str, torch.Tensor]], radius: float = RADIUS) -> Box | None:
    """Make the box of the weights within some share of their tensor's largest value."""
    usable = [w.detach() for _, w in weights]
    if not usable or any(not w.is_floating_point() or w.layout is not torch.strided for w in usable):
        return None
    reach = [radius * w.abs().amax() if w.numel() else w.sum() for w in usable]
    return Box([w - r for w, r in zip(usable, reach, strict=True)], [w + r for w, r in zip(usable, reach, strict=True)], [w.clone() for w in usable])
