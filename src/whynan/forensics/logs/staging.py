"""A log held to stages of health, after the fact."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from whynan.forensics.findings import Finding, Severity
from whynan.forensics.logs.entries import Entry
from whynan.forensics.logs.names import Role, naming
from whynan.tripwire.stages import METRICS, Stage, StageWatch

_ROLES = {"loss": Role.LOSS, "grad_norm": Role.NORM, "lr": Role.RATE, "scale": Role.SCALE}


def hold_to_stages(entries: Iterable[Entry | None], stages: tuple[Stage, ...]) -> list[Finding]:
    """Return how each stage fared: one that held is a note."""
    watch = StageWatch(stages)
    for entry in entries:
        if entry is not None and entry.step is not None and entry.step >= watch.last:
            watch.see(entry.step, {metric: _value(entry, metric) for metric in METRICS})
            _follow(watch, entry)
    watch.close()
    said = zip(watch.said, [*watch.held, *(True for _ in stages)], strict=False)
    return [Finding(Severity.NOTE if held else Severity.SUSPECT, "stage", line) for line, held in said]


def _value(entry: Entry, metric: str) -> float | None:
    """Return a value by its own name, else by what its name means: of several losses the main one."""
    if metric in entry.values:
        return entry.values[metric]
    fits = (n for n in entry.values if naming(n).role is _ROLES[metric] and not naming(n).validation and not naming(n).summary)
    return next((entry.values[n] for n in fits if metric != "loss" or naming(n).main), None)


def _follow(watch: StageWatch, entry: Entry) -> None:
    """Hold the other named values to the stage."""
    stage = watch.stage
    for pattern, bound in stage.tracked.items() if stage is not None else ():
        for name, value in entry.values.items():
            if stage is not None and (fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern)):
                watch.followed.add(pattern)
                list(watch.judge(stage, name, bound, entry.step or 0, value))
