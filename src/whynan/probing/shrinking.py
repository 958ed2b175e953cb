"""Make a failing change small: whole inputs back, then rows, then halfway to the sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from whynan.probing.steps import Step, Values, values_of

Breaks = Callable[[Values, Values | None], bool]
Tensors = tuple[torch.Tensor, ...]
HALVINGS = 12
ROW_TRIES = 40


def shrink(step: Step, values: Values, weights: Values | None, breaks: Breaks, time_left: Callable[[], bool]) -> tuple[Tensors, Tensors | None]:
    """Return a change that still breaks the step and from which no part was found that can be left out."""
    sample = values_of(step)
    if weights is not None:
        start = [w.detach() for _, w in step.weights]
        small = _smaller(start, list(weights), lambda ws: breaks(values, ws), time_left)
        return tuple(values), tuple(small)
    if any(v.shape != s.shape for v, s in zip(values, sample, strict=True)):
        return tuple(values), None
    return tuple(_smaller(sample, list(values), lambda vs: breaks(vs, None), time_left)), None


def _smaller(sample: Sequence[torch.Tensor], found: list[torch.Tensor], breaks: Callable[[Values], bool], time_left: Callable[[], bool]) -> list[torch.Tensor]:
    for number in range(len(found)):
        if not _same(found[number], sample[number]) and time_left():
            other = [*found[:number], sample[number], *found[number + 1 :]]
            if breaks(other):
                found = other
    for number in range(len(found)):
        found = _fewer_rows(sample, found, number, breaks, time_left)
    return _nearer(sample, found, breaks, time_left)


def _fewer_rows(
    sample: Sequence[torch.Tensor], found: list[torch.Tensor], number: int, breaks: Callable[[Values], bool], time_left: Callable[[], bool]
) -> list[torch.Tensor]:
    """Put rows back in halves, as long as the step still breaks."""
    if not found[number].dim() or _same(found[number], sample[number]):
        return found
    rows = [i for i in range(len(found[number])) if not _same(found[number][i], sample[number][i])]
    tries, width = 0, max(len(rows) // 2, 1)
    while len(rows) > 1 and tries < ROW_TRIES and time_left():
        for start in range(0, len(rows), width):
            back = rows[start : start + width]
            tries += 1
            other = [*found[:number], _with_rows(found[number], sample[number], back), *found[number + 1 :]]
            if len(back) < len(rows) and breaks(other):
                found, rows = other, [r for r in rows if r not in back]
                width = max(min(width, len(rows) // 2), 1)
                break
        else:
            if width == 1:
                break
            width = max(width // 2, 1)
    return found


def _with_rows(tensor: torch.Tensor, source: torch.Tensor, rows: list[int]) -> torch.Tensor:
    made = tensor.detach().clone()
    made[rows] = source.detach()[rows]
    return made.requires_grad_(tensor.requires_grad) if made.is_floating_point() else made


def _nearer(sample: Sequence[torch.Tensor], found: list[torch.Tensor], breaks: Callable[[Values], bool], time_left: Callable[[], bool]) -> list[torch.Tensor]:
    """Bisect between the sample and the failing values."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        between = [_mix(s, f, middle) for s, f in zip(sample, found, strict=True)]
        if not time_left():
            break
        if breaks(between):
            high = middle
        else:
            low = middle
    return found if high == 1.0 else [_mix(s, f, high) for s, f in zip(sample, found, strict=True)]


def _mix(start: torch.Tensor, end: torch.Tensor, share: float) -> torch.Tensor:
    if not end.is_floating_point() or _same(start, end) or not bool(torch.isfinite(end).all()):
        return end
    made = torch.lerp(start.detach(), end.detach(), share) if end.dtype is not torch.float16 else start.detach() + share * (end.detach() - start.detach())
    return made.requires_grad_(end.requires_grad)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and torch.equal(a, b))
