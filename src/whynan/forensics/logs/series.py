"""One series of a log, and all that judging it needs, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from whynan.forensics.logs.clock import Moment
from whynan.forensics.logs.curve import Curve
from whynan.forensics.logs.names import Naming, Role, naming
from whynan.forensics.logs.ordering import Order, Resume
from whynan.tripwire.spikes import Spike, SpikeWatch

_MOST_RUNS = 64
_POINTS, _FEW_POINTS = 1024, 128  # of a curve that is drawn or asked for its course, and of another
_WATCHED = (Role.LOSS, Role.NORM)
_UNORDERED = (Role.OTHER, Role.TALLY)  # nothing is said of the order of their steps
_HELD, _JUMP = 10, 1.5  # values since the highest one, and how much higher the next highest is, for it to be a jump and not a warm-up
_LARGER = 100.0  # times anything before it: a spike that no curve of this run has a scale for


@dataclass(slots=True)
class Run:
    """Non-finite values that follow each other."""

    first: Moment
    value: float
    last: Moment
    length: int = 1
    then: Moment | None = None  # where the kind changed: inf, then nan
    ended: bool = False


@dataclass(slots=True)
class Plateau:
    """A value that is repeated exactly."""

    value: float
    first: Moment
    length: int = 1


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a series was at a step when it came there first, and what it is after the run was resumed."""

    resume: Resume
    low: float
    high: float
    value: float


@dataclass(slots=True)
class Series:
    """The values of one name, each step once."""

    name: str
    naming: Naming
    order: Order = field(default_factory=Order)
    curve: Curve = field(default_factory=Curve)
    total: int = 0
    nan: int = 0
    inf: int = 0
    runs: list[Run] = field(default_factory=list)
    run_count: int = 0
    first: Moment | None = None
    last: Moment | None = None
    last_value: float = math.nan
    finite_before: tuple[Moment, float] | None = None  # the last finite value before the first non-finite one
    largest: float = 0.0  # of the values that are not absurd
    smallest: float = math.inf  # but not 0
    spikes: deque[tuple[Moment, Spike]] = field(default_factory=lambda: deque(maxlen=5))  # up to the first non-finite value
    absurd: list[tuple[Moment, Spike]] = field(default_factory=list)
    absurd_count: int = 0
    plateau: Plateau | None = None
    longest: int = 0  # the longest earlier plateau
    decimals: int = 0
    resumed: list[Resumed] = field(default_factory=list)
    jumps: list[tuple[Moment, float, float]] = field(default_factory=list)  # a new highest value after a long time: when, the old one, the new one
    since_peak: int = 0
    peak: Moment | None = None  # where the largest value of a rate or a scale is
    stepped: Moment | None = None  # the last moment that had a step
    _changes: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    _watch: SpikeWatch = field(default_factory=SpikeWatch)

    @classmethod
    def of(cls, name: str) -> Series:
        known = naming(name)
        return cls(name, known, curve=Curve(_POINTS if known.role is not Role.OTHER else _FEW_POINTS))

    def see(self, moment: Moment, value: float, live: bool) -> None:
        """Take the next value of the file."""
        if self.naming.role in _UNORDERED:
            self._take(moment, value)
            return
        resumes = len(self.order.resumes)
        for when, number in self.order.see(moment, value, live):
            self._take(when, number)
        if len(self.order.resumes) > resumes and self.first is not None and moment.position > self.first.position:  # else it is another run
            earlier = self.curve.at(moment.position)
            self.resumed += [Resumed(self.order.resumes[-1], earlier.low, earlier.high, value)] if earlier else []

    def close(self) -> None:
        """The file is read to its end."""
        for when, number in self.order.flush():
            self._take(when, number)

    @property
    def bad(self) -> int:
        """How many values are not finite."""
        return self.nan + self.inf

    @property
    def open_run(self) -> Run | None:
        """The non-finite values at the end, if it ends in such."""
        return self.runs[-1] if self.runs and not self.runs[-1].ended and self.run_count == len(self.runs) else None

    @property
    def usual_change(self) -> float:
        """How much the last values before the plateau differed from their neighbours; 0 where nothing changed."""
        return sorted(self._changes)[len(self._changes) // 2] if self._changes else 0.0

    def _take(self, moment: Moment, value: float) -> None:
        self.total += 1
        self.first = self.first or moment
        self.curve.add(moment.position, value)
        if math.isfinite(value):
            self._finite(moment, value)
        else:
            self._nonfinite(moment, value)
        self.last, self.last_value = moment, value

    def _nonfinite(self, moment: Moment, value: float) -> None:
        if math.isnan(value):
            self.nan += 1
        else:
            self.inf += 1
        run = self.runs[-1] if self.runs else None
        if run is not None and not run.ended:
            run.length += 1
            run.last = moment
            if run.then is None and math.isnan(value) != math.isnan(run.value):
                run.then = moment
            return
        self.run_count += 1
        if len(self.runs) < _MOST_RUNS:
            self.runs.append(Run(moment, value, moment))
        else:
            self.runs[-1] = Run(moment, value, moment)

    def _finite(self, moment: Moment, value: float) -> None:
        if self.runs:
            self.runs[-1].ended = True
        else:
            self.finite_before = (moment, value)
        if self.naming.role in _WATCHED:
            self._watch_for_spikes(moment, value)
            self._compare(moment, value)
        else:
            self._peak(moment, value)

    def _peak(self, moment: Moment, value: float) -> None:
        self.since_peak += 1
        if abs(value) <= self.largest:
            return
        if self.since_peak > _HELD and value > _JUMP * self.largest > 0.0 and len(self.jumps) < 5:
            self.jumps.append((moment, self.largest, value))
        self.largest, self.since_peak, self.peak = abs(value), 0, moment

    def _watch_for_spikes(self, moment: Moment, value: float) -> None:
        spike = self._watch.see(moment.position, value)
        if spike is None:
            self.largest = max(self.largest, abs(value))
            return
        if not self.runs:
            self.spikes.append((moment, spike))
        if spike.thousandfold and abs(value) > _LARGER * self.largest > 0.0:
            self.absurd_count += 1
            if len(self.absurd) < 5:
                self.absurd.append((moment, spike))
        else:
            self.largest = max(self.largest, abs(value))

    def _compare(self, moment: Moment, value: float) -> None:
        held = self.plateau
        if held is not None and held.value == value:
            held.length += 1
            return
        if held is not None:
            self.longest = max(self.longest, held.length)
            self._changes.append(abs(value - held.value))
        if self.decimals < 16:
            text = repr(value)
            self.decimals = 16 if "e" in text else max(self.decimals, len(text.partition(".")[2]))
        self.plateau = Plateau(value, moment)
        if value:
            self.smallest = min(self.smallest, abs(value))
