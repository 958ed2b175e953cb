"""Read a run directory: whatever is there, also half a line at the end, text that is no UTF-8, fields that are missing."""

from __future__ import annotations

import itertools
import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from whynan import records
from whynan.errors import UsageError
from whynan.records import Confidence, Histogram, Incident, Json, Notice, NoticeKind, Origin, Phase, Span
from whynan.report import about

T = TypeVar("T")

SERIES = ("loss", "grad_norm", "lr", "scale")
MISSING, FINITE, NAN, INF, NEGINF = range(5)
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(slots=True)
class Curves:
    """The metrics of a run by step, in order: numbers, and for each whether it is known and finite."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in SERIES})
    kinds: dict[str, bytearray] = field(default_factory=lambda: {name: bytearray() for name in SERIES})

    def __len__(self) -> int:
        return len(self.steps)

    def has(self, name: str) -> bool:
        """Whether a series was ever known."""
        return any(self.kinds[name])


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one rank of several wrote."""

    rank: int
    steps: int
    received: tuple[Incident, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory as it was read."""

    folder: Path
    incidents: tuple[Incident, ...]
    curves: Curves
    warnings: tuple[Notice, ...]
    ranks: tuple[RankFiles, ...]
    facts: Mapping[str, Json]
    unreadable: int  # lines

    @property
    def steps(self) -> int:
        """How many steps the run made, as far as its files say."""
        told = self.facts.get("steps")
        last = max((self.curves.steps[-1] + 1 if len(self.curves) else 0), max((i.step + 1 for i in self.incidents), default=0))
        return told if isinstance(told, int) and told >= last else last

    @property
    def watched(self) -> Mapping[str, Json]:
        """What `run.json` says was watched."""
        found = self.facts.get("watched")
        return found if isinstance(found, dict) else {}


def read_run(folder: Path) -> Run:
    """Read a run directory, or raise `UsageError` where there is none."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a run directory" if folder.exists() else f"no such run directory: {folder}")
    ranks = _rank_folders(folder)
    facts = about.read(folder)
    known = ("incidents.jsonl", "metrics.jsonl", "warnings.jsonl", about.FILE)
    if not any((folder / name).exists() for name in known) and not ranks:
        raise UsageError(f"{folder} holds no run: neither incidents.jsonl nor metrics.jsonl is there")
    bad = [0]
    incidents = tuple(incident_of(row) for row in _rows(folder, "incidents.jsonl", facts, bad))
    curves = _curves(_rows(folder, "metrics.jsonl", facts, bad))
    if not len(curves) and ranks:
        first = ranks[min(ranks)]
        curves = _curves(_rows(first, "metrics.jsonl", about.read(first), bad))
    notices = tuple(_record(Notice, row) for row in _rows(folder, "warnings.jsonl", facts, bad))
    return Run(folder, incidents, curves, notices, tuple(_rank_files(n, f) for n, f in sorted(ranks.items())), facts, bad[0])


def _rank_folders(folder: Path) -> dict[int, Path]:
    found = (f for f in (folder / "ranks").glob("rank-*") if f.is_dir())
    return {int(f.name[5:]): f for f in found if f.name[5:].isascii() and f.name[5:].isdigit()}


def _rank_files(rank: int, folder: Path) -> RankFiles:
    facts = about.read(folder)
    received = tuple(incident_of(row) for row in _rows(folder, "incidents.jsonl", facts, [0]))
    return RankFiles(rank, sum(1 for _ in _lines(folder / "metrics.jsonl", 0)), received)


def _rows(folder: Path, name: str, facts: Mapping[str, Json], bad: list[int]) -> Iterator[dict[str, Json]]:
    offsets = facts.get("from")
    start = offsets.get(name) if isinstance(offsets, dict) else 0
    for line in _lines(folder / name, start if isinstance(start, int) and start >= 0 else 0):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            yield row
        elif line.strip():
            bad[0] += 1


def _lines(path: Path, start: int) -> Iterator[str]:
    if not path.is_file():  # a device or a pipe would never end
        return
    try:
        with path.open("rb") as file:
            if start <= path.stat().st_size:
                file.seek(start)
            for line in file:
                yield line.decode("utf-8", "replace")
    except OSError:
        return


def _curves(rows: Iterator[dict[str, Json]]) -> Curves:
    found = Curves()
    for row in rows:
        step = row.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 62:
            found.steps.append(step)
            for name in SERIES:
                value = row.get(name)
                number = None if value is None else real(value)
                found.kinds[name].append(kind_of(number))
                found.values[name].append(0.0 if number is None else number)
    return found if _rising(found.steps) else _sorted(found)


def _rising(steps: array[int]) -> bool:
    return all(a < b for a, b in itertools.pairwise(steps))


def _sorted(curves: Curves) -> Curves:
    """Of several lines about one step the last counts."""
    last = {step: place for place, step in enumerate(curves.steps)}
    order = [last[step] for step in sorted(last)]
    return Curves(
        array("q", (curves.steps[i] for i in order)),
        {name: array("d", (column[i] for i in order)) for name, column in curves.values.items()},
        {name: bytearray(column[i] for i in order) for name, column in curves.kinds.items()},
    )


def kind_of(value: float | None) -> int:
    """Say whether a number is known and finite, in a byte."""
    if value is None:
        return MISSING
    return FINITE if math.isfinite(value) else NAN if math.isnan(value) else INF if value > 0 else NEGINF


def real(value: object) -> float | None:
    """Read a number; non-finite ones are written as words.

    >>> real("-inf"), real(3), real("three")
    (-inf, 3.0, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    return _WORDS.get(value) if isinstance(value, str) else None


# -- records ----------------------------------------------------------------------------------------------------


def incident_of(row: Mapping[str, Json]) -> Incident:
    """Return the incident that a line of `incidents.jsonl` tells; what is missing or of another kind is left at its default."""
    made = _record(Incident, row)
    return replace(made, histograms=tuple(h for h in made.histograms if _drawable(h)))


def _drawable(histogram: Histogram) -> bool:
    """Whether a histogram is one: an edge more than there are bars, and no bar below zero."""
    bars = len(histogram.counts)
    return len(histogram.edges) == (bars + 1 if bars else 0) and min(histogram.counts, default=0) >= 0


_DEFAULTS: dict[str, Any] = {"str": "", "int": 0, "float": 0.0, "bool": False}
_ENUMS: dict[str, Any] = {"Phase": Phase.FORWARD, "Confidence": Confidence.SUSPECTED, "NoticeKind": NoticeKind.SPIKE}


def _record(kind: type[T], row: object) -> T:
    """Fill a record from JSON by the annotations of its fields."""
    given: Mapping[str, Any] = row if isinstance(row, dict) else {}
    values: dict[str, Any] = {}
    for item in fields(kind):  # type: ignore[arg-type]
        name = item.name.rstrip("_")
        if kind is Origin and name == "span":
            values["span"] = _record(Span, given)  # the contract writes it flat
        elif name in given or not _has_default(item):
            values[item.name] = _value(str(item.type), given.get(name))
    return kind(**values)


def _has_default(item: Any) -> bool:
    return item.default is not NO_DEFAULT or item.default_factory is not NO_DEFAULT


def _value(annotation: str, value: Any) -> Any:
    many = re.fullmatch(r"tuple\[(.+), \.\.\.\]", annotation)
    if many:
        return tuple(_value(many[1], v) for v in value) if isinstance(value, list) else ()
    if annotation.endswith(" | None"):
        return None if value is None else _value(annotation.removesuffix(" | None"), value)
    if annotation in _DEFAULTS:
        return _plain(annotation, value)
    if annotation in _ENUMS:
        return next((member for member in type(_ENUMS[annotation]) if str(member) == value), _ENUMS[annotation])
    kind = getattr(records, annotation, None)
    return _record(kind, value) if isinstance(kind, type) else value


def _plain(annotation: str, value: Any) -> Any:
    if annotation == "str":
        text = value if isinstance(value, str) else "" if value is None else str(value)[:200]
        return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    if annotation == "float":
        return real(value) if real(value) is not None else 0.0
    if annotation == "int":
        return int(value) if isinstance(value, int | float) and abs(value) < 1 << 53 else 0
    return bool(value)
