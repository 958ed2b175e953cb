"""The numbers of a run that settings are judged by: read from a run directory of whynan, or from any log that `whynan check` reads."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from whynan.errors import UsageError
from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.logs import entries_of, recognise
from whynan.forensics.logs.names import Role, naming
from whynan.records import Incident
from whynan.report.reading import read_run

_INCIDENTS = "incidents.jsonl"


@dataclass(slots=True)
class Measured:
    """Named numbers by step, and what whynan itself found."""

    sources: list[str] = field(default_factory=list)
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    incidents: list[Incident] = field(default_factory=list)
    until: int | None = None  # only the steps before this one count

    @property
    def steps(self) -> int:
        """How many steps have numbers."""
        return len({step for values in self.values.values() for step in values})

    @property
    def bad_at(self) -> int | None:
        """The first step with an incident, or with a loss or norm that is not finite."""
        found = [incident.step for incident in self.incidents]
        for name, values in self.values.items():
            if naming(name).trained_on:
                found += [min((s for s, v in values.items() if not math.isfinite(v)), default=math.inf)]  # type: ignore[list-item]
        first = min(found, default=math.inf)
        return int(first) if math.isfinite(first) else None

    def series(self, role: Role) -> list[tuple[int, float]]:
        """The finite values of one role before anything was bad, by step; of several series the one with the most values."""
        known = {n: v for n, v in self.values.items() if naming(n).role is role and not naming(n).validation and not naming(n).summary}
        if role is Role.LOSS:
            known = {n: v for n, v in known.items() if naming(n).main} or known
        best = max(known, key=lambda n: len(known[n]), default=None)
        return self.healthy(best) if best is not None else []

    def healthy(self, name: str) -> list[tuple[int, float]]:
        """The finite values of one series before anything was bad."""
        end = min((e for e in (self.bad_at, self.until) if e is not None), default=math.inf)
        return sorted((s, v) for s, v in self.values[name].items() if math.isfinite(v) and s < end)

    def terms(self) -> dict[str, float]:
        """The typical size of each term of the loss, by its name in the log."""
        named = [n for n in self.values if naming(n).role is Role.LOSS and not naming(n).main and not naming(n).validation and not naming(n).summary]
        late = {n: [abs(v) for _, v in self.healthy(n)] for n in named}
        return {n: median(v[len(v) // 2 :]) for n, v in late.items() if len(v) >= _FEW}


_FEW = 10


def measure(paths: Iterable[Path]) -> Measured:
    """Read runs and logs; what holds none is misuse."""
    found = Measured()
    for path in paths:
        if not path.exists():
            raise UsageError(f"--run {path}: no such file or folder")
        files = _logs_in(path)
        if path.is_dir() and (path / _INCIDENTS).is_file():
            found.incidents += read_run(path).incidents
        for file in files:
            found.sources.append(str(file))
            _take(file, found)
        if not files:
            raise UsageError(f"--run {path}: no metrics.jsonl and no training log in it")
    found.incidents.sort(key=lambda i: i.step)
    return found


def _logs_in(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    metrics = path / "metrics.jsonl"
    if metrics.is_file():
        return [metrics]
    return [file for file in sorted(path.iterdir()) if file.is_file() and is_log(file)]


def is_log(file: Path) -> bool:
    """Whether a file is a training log, such as `trainer_state.json`."""
    try:
        return recognise(Place.of(str(file))) is not None
    except (OSError, Unreadable):
        return False


def _take(file: Path, found: Measured) -> None:
    try:
        for entry in entries_of(Place.of(str(file))):
            if entry is not None and entry.step is not None:
                for name, value in entry.values.items():
                    found.values.setdefault(name, {})[entry.step] = value
    except (OSError, Unreadable) as why:
        raise UsageError(f"--run {file}: {why}") from None
