"""Everything a log says, gathered in one pass and bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from whynan.forensics.logs.clock import Clock, Moment
from whynan.forensics.logs.entries import Entry
from whynan.forensics.logs.names import Role
from whynan.forensics.logs.series import Series

_MOST_SERIES = 1024


@dataclass(slots=True)
class Meeting:
    """Steps at which the loss looks healthy and the gradient norm is not."""

    first: Moment | None = None
    count: int = 0
    zeros: int = 0  # of them, those with a loss of exactly 0

    def take(self, moment: Moment, loss: float) -> None:
        self.first = self.first or moment
        self.count += 1
        self.zeros += loss == 0.0


@dataclass(slots=True)
class Silence:
    """The entries that name a loss and have no value for it, beside nothing but what stood beside it before."""

    beside: set[str] = field(default_factory=set)
    first: Moment | None = None  # of those at the end
    length: int = 0  # of them
    longest: int = 0  # of an earlier stretch

    def speak(self, names: Iterable[str]) -> None:
        self.beside.update(names)
        self.longest = max(self.longest, self.length)
        self.first, self.length = None, 0

    def hush(self, moment: Moment, names: Iterable[str]) -> None:
        if self.beside.issuperset(names):  # else a row of another kind: of a validation, of a test
            self.first = self.first or moment
            self.length += 1


@dataclass(slots=True)
class Log:
    """The series of a log."""

    form: str
    allow: tuple[str, ...] = ()
    series: dict[str, Series] = field(default_factory=dict)
    entries: int = 0
    broken: int = 0
    crowded: int = 0  # values of names beyond the first 1 024
    hidden: Meeting = field(default_factory=Meeting)  # the loss finite, the gradient norm not
    silences: dict[str, Silence] = field(default_factory=dict)
    _clock: Clock = field(default_factory=Clock)
    _stepped: Moment | None = None
    _loss: dict[str, tuple[int, float]] = field(default_factory=dict)
    _norm: tuple[int, float] | None = None

    def gather(self, entries: Iterable[Entry | None]) -> Log:
        """Read to the end."""
        for entry in entries:
            if entry is None:
                self.broken += 1
            elif entry.values or entry.holes:
                self._add(entry)
        for series in self.series.values():
            series.close()
        return self

    @property
    def curves(self) -> list[Series]:
        """The series that have values, in the order in which they appear."""
        return [s for s in self.series.values() if s.total]

    def of_role(self, role: Role) -> list[Series]:
        """The series that mean one thing."""
        return [s for s in self.curves if s.naming.role is role]

    def main_loss(self) -> Series | None:
        """The loss that is trained on: the one called so, else the one with the most values."""
        trained = [s for s in self.of_role(Role.LOSS) if not s.naming.validation]
        return max(trained, key=lambda s: (s.naming.main, not s.naming.summary, s.total), default=None)

    def _add(self, entry: Entry) -> None:
        self.entries += 1
        moment = self._clock.of(entry)
        for name in entry.holes:
            if name in self.silences:
                self.silences[name].hush(moment, entry.values)
        for name, value in entry.values.items():
            series = self.series.get(name) or self._named(name)
            if series is None:
                continue
            if moment.step is not None:
                series.stepped = self._stepped = moment
            elif series.stepped is not None:
                if math.isfinite(value):
                    continue  # a summary of steps that were written before: of an epoch, of a window
                moment = self._stepped or moment
            series.see(moment, value, entry.live)
            if series.naming.role is Role.LOSS:
                if series.naming.main and not series.naming.validation:
                    self._meet_loss(moment, series, value)
                    self.silences.setdefault(name, Silence()).speak(entry.values)
            elif series.naming.role is Role.NORM:
                self._meet_norm(moment, value)

    def _named(self, name: str) -> Series | None:
        if len(self.series) >= _MOST_SERIES or any(fnmatchcase(name, pattern) for pattern in self.allow):
            self.crowded += len(self.series) >= _MOST_SERIES
            return None
        return self.series.setdefault(name, Series.of(name))

    def _meet_loss(self, moment: Moment, series: Series, value: float) -> None:
        self._loss[series.name] = (moment.position, value)
        if self._norm is not None and self._norm[0] == moment.position:
            self._meet(moment, value, self._norm[1])

    def _meet_norm(self, moment: Moment, value: float) -> None:
        self._norm = (moment.position, value)
        for position, loss in self._loss.values():
            if position == moment.position:
                self._meet(moment, loss, value)

    def _meet(self, moment: Moment, loss: float, norm: float) -> None:
        if math.isfinite(loss) and not math.isfinite(norm):
            self.hidden.take(moment, loss)
