"""The curves of a run as data for the page: few points, each gap kept, and a summary in words."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from whynan.records import Incident, Json, count, jsonable, number
from whynan.report.limits import LIMITS, doublings
from whynan.report.reading import FINITE, INF, MISSING, NAN, NEGINF, Curves, Run, real
from whynan.report.thinning import thinned

_WORDS = {NAN: "nan", INF: "inf", NEGINF: "-inf"}
_TITLES = (
    ("loss", "loss", "no loss was known on the host"),
    ("grad_norm", "gradient norm", "no gradient norm was known on the host"),
    ("lr", "learning rate", "no learning rate was known"),
    ("scale", "loss scale", "no gradient scaler was at work, or its scale was not known on the host"),
)
_HEADROOM = "doublings left before the dtype ends"


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: its name, what it says in words, and whether there is anything to draw."""

    key: str
    title: str
    summary: str
    drawn: bool
    note: str = ""


def charts(run: Run) -> tuple[list[Chart], dict[str, Json]]:
    """Return the charts of a run, and the data that the page draws them from."""
    always = frozenset(i.step for i in run.incidents)
    kept = thinned(run.curves, always)
    told = [Chart(key, title, _summary(run.curves, key) or why, run.curves.has(key)) for key, title, why in _TITLES]
    steps, places = _with_incidents(run, kept)
    series: dict[str, Json] = {key: _points(run.curves, key, places) for key, _, _ in _TITLES if run.curves.has(key)}
    room = _headroom(run, places)
    if any(isinstance(v, float) for v in room):
        series["headroom"] = room
    told.append(_headroom_chart(run, room))
    told.sort(key=lambda chart: not chart.drawn)
    return told, {"steps": jsonable(steps), "series": series, "thinned": len(kept) < len(run.curves)}


def _with_incidents(run: Run, kept: Sequence[int]) -> tuple[list[int], list[int | None]]:
    """The steps to draw and their places; an incident that no line of metrics is about, as of a crash, has a step without place."""
    found: dict[int, int | None] = {run.curves.steps[i]: i for i in kept}
    found |= {i.step: None for i in run.incidents if i.step >= 0 and i.step not in found} if found else {}
    steps = sorted(found)
    return steps, [found[step] for step in steps]


def _points(curves: Curves, key: str, places: Sequence[int | None]) -> list[Json]:
    values, kinds = curves.values[key], curves.kinds[key]
    return [None if i is None else _rounded(values[i]) if kinds[i] == FINITE else _WORDS.get(kinds[i]) for i in places]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _summary(curves: Curves, key: str) -> str:
    values, kinds = curves.values[key], curves.kinds[key]
    finite = [v for v, k in zip(values, kinds, strict=True) if k == FINITE]
    gaps = [s for s, k in zip(curves.steps, kinds, strict=True) if k not in (FINITE, MISSING)]
    words = [f"from {number(finite[0])} to {number(finite[-1])}", f"min {number(min(finite))}", f"max {number(max(finite))}"] if finite else []
    if gaps:
        listed = ", ".join(map(str, gaps[:5])) + (" …" if len(gaps) > 5 else "")
        words.append(f"not finite at {count(len(gaps))} step{'s' * (len(gaps) != 1)}: {listed}")
    return "; ".join(words)


def _headroom(run: Run, places: Sequence[int | None]) -> list[Json]:
    """The fewest doublings that loss and gradient norm have left at each step, and float16 weights as they were last read."""
    dtypes = {"loss": _dtype(run, "loss_dtype"), "grad_norm": _dtype(run, "norm_dtype")}
    weights = _weight_readings(run.watched)
    return [None if place is None else _room_at(run.curves, place, dtypes, weights) for place in places]


def _room_at(curves: Curves, place: int, dtypes: Mapping[str, str], weights: Sequence[tuple[int, float]]) -> Json:
    found = []
    for key, dtype in dtypes.items():
        kind = curves.kinds[key][place]
        if kind not in (FINITE, MISSING):
            return _WORDS[kind]
        left = doublings(curves.values[key][place], dtype) if kind == FINITE else None
        found += [left] if left is not None else []
    before = bisect.bisect_right(weights, (curves.steps[place], math.inf))
    found += [weights[before - 1][1]] if before else []
    return round(min(found), 2) if found else None


def _weight_readings(facts: Mapping[str, Json]) -> list[tuple[int, float]]:
    """Step by step, in order: the fewest doublings a float16 weight had left."""
    found: dict[int, float] = {}
    for points in readings_of(facts).values():
        for step, value in points:
            left = doublings(value, "float16")
            if left is not None:
                found[step] = min(left, found.get(step, math.inf))
    return sorted(found.items())


def readings_of(facts: Mapping[str, Json]) -> dict[str, list[tuple[int, float]]]:
    """Return the readings of float16 weights that a run wrote, by name."""
    given = facts.get("readings")
    found: dict[str, list[tuple[int, float]]] = {}
    for name, points in given.items() if isinstance(given, dict) else ():
        pairs = [p for p in points if isinstance(p, list) and len(p) == 2] if isinstance(points, list) else []
        found[name] = [(step, value) for step, raw in pairs if isinstance(step, int) and (value := real(raw)) is not None]
    return found


def _dtype(run: Run, key: str) -> str:
    told = run.watched.get(key)
    return told if isinstance(told, str) and told in LIMITS else "float32"


def _headroom_chart(run: Run, room: Sequence[Json]) -> Chart:
    known = [v for v in room if isinstance(v, float)]
    if not known:
        return Chart("headroom", _HEADROOM, "not measured", False)
    dtypes = f"loss in {_dtype(run, 'loss_dtype')}, gradient norm in {_dtype(run, 'norm_dtype')}"
    assumed = "" if run.watched.get("loss_dtype") else " (dtype not told, taken as float32)"
    weights = "; float16 weights as last read, every 100 steps" if readings_of(run.watched) else ""
    return Chart("headroom", _HEADROOM, f"least {number(min(known))}", True, f"{dtypes}{assumed}{weights}; activations are measured only at an incident")


def incident_marks(incidents: Sequence[Incident], kinds: Mapping[int, int], most: int) -> list[Json]:
    """Return what the page needs to mark incidents on the charts: step, number of its kind, words."""
    return [[i.step, kinds[n], f"step {count(i.step)}: {i.cause.title} ({i.cause.code})"] for n, i in enumerate(incidents[:most])]
