"""Which tensors grew over the checkpoints before the first bad one."""

from __future__ import annotations

from collections.abc import Sequence

from whynan.forensics.checkpoints.judging import largest_of
from whynan.forensics.checkpoints.roles import Role, role_of
from whynan.forensics.findings import Checked
from whynan.records import number

_SHOWN = 3
_FACTOR = 1.5  # a checkpoint; training as it should be grows slower, and not for long
_TOTAL = 8.0
_FEWEST = 3  # checkpoints in a row


def growth_before(members: Sequence[Checked], bad: int | None) -> list[str]:
    """Say which tensors grew from checkpoint to checkpoint up to the first bad one, the fastest first."""
    if bad is None:
        return []
    before = [c for c in members[: bad + 1] if not c.unreadable and c.tensors]
    series: dict[str, list[tuple[Checked, float]]] = {}
    for checked in before:
        for tensor in checked.tensors:
            if not tensor.nonfinite and tensor.max is not None and role_of(tensor.name) in (Role.WEIGHT, Role.BUFFER):  # fresh moments grow by nature
                series.setdefault(tensor.name, []).append((checked, largest_of(tensor)))
    runs = [(name, run) for name, points in series.items() if (run := _run(points, before))]
    runs.sort(key=lambda item: item[1][-1][1] / item[1][0][1], reverse=True)
    more = [f"and {len(runs) - _SHOWN} more grew as well"] if len(runs) > _SHOWN else []
    return [_said(name, run) for name, run in runs[:_SHOWN]] + more


def _run(points: Sequence[tuple[Checked, float]], before: Sequence[Checked]) -> list[tuple[Checked, float]]:
    """Return the stretch of steady growth that ends at the last finite point, where that is just before the damage."""
    if len(before) < _FEWEST or points[-1][0] not in before[-2:]:
        return []
    start = len(points) - 1
    while start and points[start - 1][1] > 0 and points[start][1] >= _FACTOR * points[start - 1][1]:
        start -= 1
    run = list(points[start:])
    return run if len(run) >= _FEWEST and run[-1][1] >= _TOTAL * run[0][1] else []


def _said(name: str, run: Sequence[tuple[Checked, float]]) -> str:
    (first, low), (_, high) = run[0], run[-1]
    each = (high / low) ** (1 / (len(run) - 1))
    since = f"step {first.step}" if first.step is not None else first.name
    return f"{name} grew {number(float(f'{each:.2g}'))}x a checkpoint since {since} ({number(low)} to {number(high)})"
