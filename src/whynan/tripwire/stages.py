"""Stages of health: what a user expects of a run, written down by stretches of steps, and held against the numbers.

    [stage.start]
    until = 500               # the first step that is no longer part of it; the last stage may leave it out
    loss = "< 10"             # loss, grad_norm, lr, scale: each value in the stage
    grad_norm = "< 5"
    loss_falls_by = 0.5       # from the median of the first tenth to that of the last; also "30%"
    "*.alpha" = "0 .. 0.1"    # any other name is a parameter, a buffer, an entry of the optimizer or an output, as in track

Stages follow each other in the order of the file. Torch is not needed to read or to judge.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from whynan.errors import UsageError
from whynan.records import Notice, NoticeKind, number

METRICS = ("loss", "grad_norm", "lr", "scale")
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SIDE = re.compile(rf"(<=|>=|<|>)\s*({_NUMBER})")
_RANGE = re.compile(rf"({_NUMBER})\s*\.\.\s*({_NUMBER})")
_FALL = re.compile(r"(\w+)_falls_by")
_MOST = 4096  # values kept of each end of a stage, to judge a fall


@dataclass(frozen=True, slots=True)
class Bound:
    """What a value is to be: between two ends that belong to it or not."""

    text: str  # as written
    low: float = -math.inf
    high: float = math.inf
    with_low: bool = True
    with_high: bool = True

    def holds(self, value: float) -> bool:
        """Whether a value is within."""
        above = value >= self.low if self.with_low else value > self.low
        return above and (value <= self.high if self.with_high else value < self.high)

    @property
    def track(self) -> dict[str, float]:
        """The same as limits of `track`, whose ends do not belong to it."""
        ends: dict[str, float] = {}
        if self.high < math.inf:
            ends["below"] = math.nextafter(self.high, math.inf) if self.with_high else self.high
        if self.low > -math.inf:
            ends["above"] = math.nextafter(self.low, -math.inf) if self.with_low else self.low
        return ends


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of steps and what is expected of it."""

    name: str
    begin: int
    until: int | None
    bounds: dict[str, Bound] = field(default_factory=dict)  # of loss, grad_norm, lr, scale
    tracked: dict[str, Bound] = field(default_factory=dict)  # of other names
    falls: dict[str, tuple[float, bool]] = field(default_factory=dict)  # by how much, and whether that is a part of it

    def holds_step(self, step: int) -> bool:
        """Whether a step is part of it."""
        return step >= self.begin and (self.until is None or step < self.until)


def read_stages(file: Path) -> tuple[Stage, ...]:
    """Read a file of stages; what makes no sense is a `UsageError` in one line."""
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--expect {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"--expect {file}: not TOML: {error}") from None
    try:
        return stages_of(given)
    except UsageError as error:
        raise UsageError(f"--expect {file}: {error}") from None


def stages_from(given: object) -> tuple[Stage, ...]:
    """Read the option `expect`: a file, or a mapping such as the file holds."""
    if given is None:
        return ()
    if isinstance(given, str | os.PathLike):
        return read_stages(Path(given))
    if not isinstance(given, Mapping):
        raise UsageError(f"expect is a file of stages, not {type(given).__name__}")
    try:
        return stages_of(given)
    except UsageError as error:
        raise UsageError(f"expect: {error}") from None


def stages_of(given: Mapping[str, object]) -> tuple[Stage, ...]:
    """Read stages from a mapping.

    >>> stages_of({"stage": {"start": {"until": 500, "loss": "< 10"}}})[0].bounds["loss"].holds(9.5)
    True
    """
    tables = given.get("stage") if isinstance(given, Mapping) else None
    if not isinstance(tables, Mapping) or not tables:
        raise UsageError('no stages in it; write [stage.start] with until = 500 and loss = "< 10" below it')
    if len(given) > 1:
        raise UsageError(f"{next(k for k in given if k != 'stage')!r} is no stage; write [stage.NAME]")
    found: list[Stage] = []
    begin: int | None = 0
    for name, table in tables.items():
        if begin is None:
            raise UsageError(f"stage {found[-1].name} has no 'until', so stage {name} never begins")
        found.append(_stage(str(name), begin, table))
        begin = found[-1].until
    return tuple(found)


def _stage(name: str, begin: int, table: object) -> Stage:
    if not isinstance(table, Mapping):
        raise UsageError(f"stage {name} is a table, not {table!r}")
    until = table.get("until")
    if until is not None and (isinstance(until, bool) or not isinstance(until, int) or until <= begin):
        raise UsageError(f"stage {name}: 'until' is a step after {begin}, not {until!r}")
    stage = Stage(name, begin, until, {}, {}, {})
    for key, value in table.items():
        if key != "until":
            _expect(stage, key, value)
    if not (stage.bounds or stage.tracked or stage.falls):
        raise UsageError(f'stage {name} expects nothing; write for example loss = "< 10"')
    return stage


def _expect(stage: Stage, key: str, value: object) -> None:
    fall = _FALL.fullmatch(key)
    if fall is not None and fall[1] in METRICS:
        stage.falls[fall[1]] = _fall(stage.name, key, value)
        return
    kind = stage.bounds if key in METRICS else stage.tracked
    kind[key] = _bound(stage.name, key, value)


def _fall(stage: str, key: str, value: object) -> tuple[float, bool]:
    if isinstance(value, str) and re.fullmatch(rf"{_NUMBER}\s*%", value.strip()):
        return float(value.strip().rstrip("% ")) / 100, True
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f'stage {stage}: {key} is a number or a part such as "30%", not {value!r}')
    return float(value), False


def _bound(stage: str, key: str, value: object) -> Bound:
    text = value.strip() if isinstance(value, str) else ""
    side, both = _SIDE.fullmatch(text), _RANGE.fullmatch(text)
    if side is not None:
        end, inside = float(side[2]), "=" in side[1]
        return Bound(text, high=end, with_high=inside) if "<" in side[1] else Bound(text, low=end, with_low=inside)
    if both is not None and float(both[1]) <= float(both[2]):
        return Bound(text, float(both[1]), float(both[2]))
    raise UsageError(f'stage {stage}: {key} is written as "< 10", ">= 0" or "0 .. 10", not {value!r}')


@dataclass(slots=True)
class _Count:
    """How one expectation fared in a stage."""

    seen: int = 0
    bad: int = 0
    first: str = ""  # the first value that did not fit
    outside: bool = False


@dataclass(slots=True)
class StageWatch:
    """Holds the numbers of a run to its stages, one step after the other.

    >>> watch = StageWatch(stages_of({"stage": {"start": {"until": 2, "loss": "< 1"}, "rest": {"loss": "< 9"}}}))
    >>> [n.text for n in watch.see(0, {"loss": 3.0})]
    ['loss is 3 at step 0; in stage start it was to be < 1']
    >>> [n.text for n in watch.see(2, {"loss": 3.0})], watch.said
    ([], ['stage start (step 0) did not hold: loss 3 at step 0 is not < 1'])

    Cost: a comparison for each expectation and step.
    """

    stages: tuple[Stage, ...]
    at: int = 0
    said: list[str] = field(default_factory=list)  # of the stages that are over
    held: list[bool] = field(default_factory=list)
    last: int = -1
    live: bool = False  # tracked names are looked up in the model, not in a log
    followed: set[str] = field(default_factory=set)  # tracked patterns that a log has
    _counts: dict[str, _Count] = field(default_factory=dict)
    _ends: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)

    @property
    def stage(self) -> Stage | None:
        """The one that is under way."""
        return self.stages[self.at] if self.at < len(self.stages) else None

    def see(self, step: int, values: Mapping[str, float | None]) -> list[Notice]:
        """Take what is known of a step; answer with what does not fit for the first time in a row."""
        stage = self.stage
        while stage is not None and stage.until is not None and step >= stage.until:
            self._end(stage)
            stage = self.stage
        if stage is None:
            return []
        self.last = step
        for name in stage.falls:
            self._keep(name, values.get(name))
        return [n for name, bound in stage.bounds.items() for n in self.judge(stage, name, bound, step, values.get(name))]

    def judge(self, stage: Stage, name: str, bound: Bound, step: int, value: float | None) -> Iterator[Notice]:
        """Hold one value to what was expected of it. One that is not finite does not fit, and is told elsewhere."""
        if value is None:
            return
        count = self._counts.setdefault(name, _Count())
        count.seen += 1
        if bound.holds(value):
            count.outside = False
            return
        count.bad += 1
        count.first = count.first or f"{name} {number(value)} at step {step} is not {bound.text}"
        if not count.outside and math.isfinite(value):
            text = f"{name} is {number(value)} at step {step}; in stage {stage.name} it was to be {bound.text}"
            yield Notice(NoticeKind.LIMIT, step, f"{name} in stage {stage.name}", value, text)
        count.outside = True

    def tracked(self, notice: Notice) -> Notice:
        """Take a crossing of a tracked value in this stage."""
        stage = self.stage
        count = self._counts.setdefault(notice.name, _Count())
        count.bad += 1
        count.first = count.first or notice.text.replace("; it was", ", it was")
        return Notice(notice.kind, notice.step, notice.name, notice.value, f"{notice.text} (stage {stage.name if stage else ''})")

    def close(self) -> None:
        """The run is over: say how the stage under way stands, and which ones it did not reach."""
        stage = self.stage
        if stage is not None and self.last >= stage.begin:
            self._end(stage, early=True)
        self.said += [f"stage {s.name} (from step {s.begin}) was not reached" for s in self.stages[self.at :]]
        self.at = len(self.stages)

    def _keep(self, name: str, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            first, last = self._ends.setdefault(name, ([], []))
            if len(first) < _MOST:
                first.append(value)
            last.append(value)
            del last[: -2 * _MOST if len(last) > 4 * _MOST else 0]

    def _end(self, stage: Stage, early: bool = False) -> None:
        failed = [c.first + (f", nor in {c.bad - 1} other steps" if c.bad > 1 else "") for c in self._counts.values() if c.bad]
        failed += [text for name, fall in stage.falls.items() if (text := self._fallen(name, *fall))]
        unseen = [n for n in stage.bounds if n not in self._counts or not self._counts[n].seen] + [n for n in stage.falls if n not in self._ends]
        unseen += [p for p in stage.tracked if not self.live and p not in self.followed]
        steps = f"steps {stage.begin} to {self.last}" if self.last > stage.begin else f"step {stage.begin}"
        steps += f", until {stage.until} not reached" if early and stage.until is not None and self.last + 1 < stage.until else ""
        if not (self.last >= stage.begin):
            self.said.append(f"stage {stage.name} (from step {stage.begin}) had no steps")
        else:
            named = {**dict.fromkeys([*stage.bounds, *stage.tracked]), **{f"{n}_falls_by": n for n in stage.falls}}
            known = [n for n, of in named.items() if (of or n) not in unseen]
            verdict = f"did not hold: {'; '.join(failed)}" if failed else f"held: {', '.join(known)}" if known else "could not be checked"
            self.said.append(f"stage {stage.name} ({steps}) {verdict}" + (f"; not known: {', '.join(dict.fromkeys(unseen))}" if unseen else ""))
        self.held.append(not failed)
        self.at += 1
        self._counts, self._ends, self.followed = {}, {}, set()

    def _fallen(self, name: str, least: float, part: bool) -> str:
        first, last = self._ends.get(name, ([], []))
        if not first:
            return ""
        tenth = max(1, min(len(last), _MOST) // 10)
        before, after = median(first[:tenth]), median(last[-tenth:])
        wanted = least * abs(before) if part else least
        by = f"{number(100 * least)}%" if part else number(least)
        return "" if before - after >= wanted else f"{name} went from {number(before)} to {number(after)}, it was to fall by {by}"
