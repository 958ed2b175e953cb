"""When an entry was written, as one number that grows: counters that begin again with each epoch are put end to end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from whynan.forensics.logs.entries import Entry
from whynan.records import count

_MOST_KINDS = 4096  # of lines, told apart by their first name


class Moment(NamedTuple):
    """When a value was written."""

    position: int  # grows with time within one run
    line: int
    step: int | None
    epoch: float | None
    total: int | None
    inner: bool

    def __str__(self) -> str:
        """Say it with the file's own numbers."""
        epoch = "" if self.epoch is None else f"epoch {self.epoch:g}"
        if self.step is None:
            return epoch or f"entry {count(self.position)}"
        if not self.inner:
            return f"step {count(self.step)}"
        inside = f"{count(self.step)}/{count(self.total)}" if self.total else f"step {count(self.step)}"
        return f"{epoch}, {inside}" if epoch else f"{inside} (entry {count(self.position)})" if self.position != self.step else inside


@dataclass(slots=True)
class _Lap:
    """A counter that may begin again."""

    last: int = -1
    offset: int = 0
    epoch: float | None = None


@dataclass(slots=True)
class _Tally:
    """Counts entries that carry no step."""

    last: int = 0
    whole: bool = True  # every entry so far had another whole epoch
    begun: bool = False

    def next(self, epoch: float | None) -> int:
        self.whole = self.whole and epoch is not None and epoch.is_integer() and not (self.begun and int(epoch) == self.last)
        self.begun = True
        self.last = int(epoch) if self.whole and epoch is not None else self.last + 1
        return self.last


@dataclass(slots=True)
class Clock:
    """Gives every entry its moment.

    >>> clock = Clock()
    >>> [clock.of(Entry(0, {}, step=s, total=3, inner=True)).position for s in (1, 2, 3, 1)]
    [1, 2, 3, 4]
    """

    _laps: dict[tuple[int | None, str], _Lap] = field(default_factory=dict)
    _unnamed: dict[str, _Tally] = field(default_factory=dict)

    def of(self, entry: Entry) -> Moment:
        """Return the moment of the next entry."""
        position, inner = self._position(entry)
        return Moment(position, entry.line, entry.step, entry.epoch, entry.total, inner)

    def _position(self, entry: Entry) -> tuple[int, bool]:
        if entry.step is None:
            return self._by_order(entry), False
        whole = entry.epoch is not None and entry.epoch == int(entry.epoch)
        if entry.inner and entry.total and whole and entry.step <= entry.total:
            return int(entry.epoch or 0) * entry.total + entry.step, True
        return self._lapped(entry)

    def _lapped(self, entry: Entry) -> tuple[int, bool]:
        key = (entry.total, next(iter(entry.values), "")) if entry.inner else (None, next(iter(entry.values), ""))
        lap = self._laps.setdefault(key, _Lap()) if len(self._laps) < _MOST_KINDS else _Lap()
        step = entry.step or 0
        later = entry.epoch is not None and lap.epoch is not None and int(entry.epoch) > int(lap.epoch)
        if step < lap.last and (later or (entry.inner and 2 * step <= lap.last)):
            lap.offset += max(entry.total or 0, lap.last)
        lap.last, lap.epoch = step, entry.epoch
        return lap.offset + step, entry.inner or lap.offset > 0

    def _by_order(self, entry: Entry) -> int:
        """Return the epoch where whole epochs are counted, else the number of the entry: for each first name apart, lines of another kind do not make steps."""
        name = next(iter(entry.values), "")
        tally = self._unnamed.setdefault(name, _Tally()) if len(self._unnamed) < _MOST_KINDS or name in self._unnamed else _Tally()
        return tally.next(entry.epoch)
