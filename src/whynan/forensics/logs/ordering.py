"""The order of one series: the same step written several times, steps that go back, steps that are missing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from whynan.forensics.logs.clock import Moment

_WINDOW = 8  # steps by which ranks may be apart in the file
_CALM = 3  # steps written once before a step that goes back means that the run was resumed
_MOST_KEPT = 32


@dataclass(slots=True)
class _Slot:
    moment: Moment
    value: float
    copies: int = 1
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """A place where the steps go back."""

    before: Moment
    after: Moment


@dataclass(slots=True)
class Order:
    """Puts the values of one series in order: one value a step.

    Of several values for one step the non-finite one is kept, else the first; of a progress bar the last.
    """

    copies: Counter[int] = field(default_factory=Counter)
    differing: int = 0
    resumes: list[Resume] = field(default_factory=list)
    strides: Counter[int] = field(default_factory=Counter)
    gaps: list[tuple[Moment, Moment]] = field(default_factory=list)
    typical: int = 1  # how often a step is usually written
    _usual: int = 0  # the most frequent stride
    _calm: bool = False  # steps are written once, one after the other
    _pending: dict[int, _Slot] = field(default_factory=dict)
    _newest: Moment | None = None
    _out: Moment | None = None

    def see(self, moment: Moment, value: float, live: bool) -> list[tuple[Moment, float]]:
        """Take the next value; return the values that are complete."""
        slot = self._pending.get(moment.position)
        newest = self._newest
        done: list[tuple[Moment, float]] = []
        if newest is not None and moment.position < newest.position and (slot is None or self._calm):
            if self._late(moment, newest):
                return done
            done = self._resume(newest, moment)
            slot = newest = None
        if slot is not None:
            self._again(slot, moment, value, live)
            return done
        self._pending[moment.position] = _Slot(moment, value)
        if newest is None or moment.position > newest.position:
            self._newest = moment
        if len(self._pending) > (1 if self._calm else _WINDOW):
            done.append(self._finish(next(iter(self._pending))))
        return done

    def flush(self) -> list[tuple[Moment, float]]:
        """Return what is left."""
        return [self._finish(position) for position in tuple(self._pending)]

    def _late(self, moment: Moment, newest: Moment) -> bool:
        """Whether another rank writes a step that is already complete."""
        return not self._calm and moment.position not in self._pending and newest.position - moment.position <= _WINDOW and self.typical > 1

    def _resume(self, newest: Moment, moment: Moment) -> list[tuple[Moment, float]]:
        done = self.flush()
        if len(self.resumes) < _MOST_KEPT:
            self.resumes.append(Resume(newest, moment))
        self._newest = self._out = None
        return done

    def _again(self, slot: _Slot, moment: Moment, value: float, live: bool) -> None:
        if live:
            slot.value, slot.moment = value, moment
            return
        slot.copies += 1
        same = value == slot.value or (value != value and slot.value != slot.value)
        slot.differs = slot.differs or not same
        if value - value != 0 and slot.value - slot.value == 0:
            slot.value, slot.moment = value, moment

    def _finish(self, position: int) -> tuple[Moment, float]:
        slot = self._pending.pop(position)
        self.copies[slot.copies] += 1
        if self.copies[slot.copies] > self.copies[self.typical]:
            self.typical = slot.copies
        self._calm = self.typical == 1 and self.copies[1] >= _CALM
        self.differing += slot.differs
        if self._out is not None:
            self._stride(self._out, slot.moment)
        self._out = slot.moment
        return slot.moment, slot.value

    def _stride(self, before: Moment, after: Moment) -> None:
        stride = after.position - before.position
        if len(self.strides) < 256 or stride in self.strides:
            self.strides[stride] += 1
        if self.strides[stride] > self.strides[self._usual]:
            self._usual = stride
        if stride > 10 * self._usual and self.strides[self._usual] >= 16 and len(self.gaps) < _MOST_KEPT:
            self.gaps.append((before, after))
