"""The modules of a run as rows of a tree: when the damage reached each, and how large its values were."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from whynan.records import Incident, ModuleState, number
from whynan.report.charts import readings_of
from whynan.report.drawing import sparkline
from whynan.report.limits import share_text
from whynan.report.reading import Run

MOST = 300
_DEEPEST = 8
NOT_MEASURED = "not measured"


@dataclass(slots=True)
class _Seen:
    kind: str
    states: list[tuple[int, ModuleState]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Branch:
    """One row of the tree."""

    name: str
    shown: str  # what its name adds to that of the row it is part of
    depth: int
    kind: str
    bad: str  # what was bad: output, weights, gradient
    last_good: str
    first_bad: str
    output: str
    output_share: str
    weight: str
    weight_share: str
    spark: str
    trend: str


def branches(run: Run) -> tuple[list[Branch], int]:
    """Return the rows of the tree, and how many more there are."""
    seen: dict[str, _Seen] = {}
    for incident in run.incidents:
        for state in incident.modules:
            seen.setdefault(state.name, _Seen(state.kind)).states.append((incident.step, state))
    readings = readings_of(run.watched)
    ordered = sorted(seen.items(), key=lambda item: _order(item[0]))
    rows = [_branch(name, seen, run, _of_module(name, readings)) for name, _ in ordered[:MOST]]
    return rows, max(len(ordered) - MOST, 0)


def _order(name: str) -> list[tuple[str, int]]:
    """Numbers in a name by their value: `l2` before `l10`."""
    return [(words, int(digits or -1)) for words, digits in re.findall(r"(\D*)([0-9]{0,15})", name)] if name else []


def _parent(name: str, listed: dict[str, _Seen]) -> str:
    """The nearest listed module that a module is part of; containers that only hold others are not listed."""
    while name:
        name = name.rpartition(".")[0]
        if name in listed:
            break
    return name


def _depth(name: str, listed: dict[str, _Seen]) -> int:
    depth = 0
    while name:
        name, depth = _parent(name, listed), depth + 1
    return min(depth, _DEEPEST)


def _of_module(name: str, readings: dict[str, list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """The readings of a module's own float16 weights: of several the largest."""
    found: dict[int, float] = {}
    for tensor, points in readings.items():
        if tensor.rpartition(".")[0] == name:
            for step, value in points:
                found[step] = max(value, found.get(step, 0.0))
    return sorted(found.items())


def _branch(name: str, listed: dict[str, _Seen], run: Run, readings: list[tuple[int, float]]) -> Branch:
    seen = listed[name]
    bad = [(step, state) for step, state in seen.states if state.bad]
    first = bad[0][0] if bad else None
    top = max((s for _, s in seen.states if s.largest is not None), key=lambda s: s.largest or 0.0, default=None)
    heavy = max((s for _, s in seen.states if s.weight_largest is not None), key=lambda s: s.weight_largest or 0.0, default=None)
    points = readings or [(step, s.largest) for step, s in seen.states if s.largest is not None]
    drawn = sparkline(points)
    return Branch(
        name,
        name.removeprefix(f"{_parent(name, listed)}.") or "(model)",
        _depth(name, listed),
        seen.kind,
        _damage([state for _, state in bad]),
        _last_good(run.incidents, first, run.steps),
        "never" if first is None else str(first),
        number(top.largest) if top is not None and top.largest is not None else NOT_MEASURED,
        share_text(top.largest, top.dtype) if top is not None and top.largest is not None else "",
        number(heavy.weight_largest) if heavy is not None and heavy.weight_largest is not None else "",
        share_text(heavy.weight_largest, heavy.weight_dtype) if heavy is not None and heavy.weight_largest is not None else "",
        drawn,
        f"{'weights' if readings else 'output'} at {len(points)} steps" if drawn else "1 reading" if points else NOT_MEASURED,
    )


def _damage(states: Sequence[ModuleState]) -> str:
    words = (("output", any(s.bad_output for s in states)), ("weights", any(s.bad_weight for s in states)), ("gradient", any(s.bad_gradient for s in states)))
    return ", ".join(word for word, there in words if there)


def _last_good(incidents: Sequence[Incident], first: int | None, steps: int) -> str:
    """The last step before the damage that was no incident; for a module that was never bad, the last step of all."""
    bad = {i.step for i in incidents}
    step = steps - 1 if first is None else first - 1
    while first is not None and step in bad:
        step -= 1
    return str(step) if step >= 0 else "none"
