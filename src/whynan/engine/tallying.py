"""How often the condition of an incident comes back, in batches that failed and in those that did not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from whynan.capsule.recorder import Recorder
from whynan.capsule.replay import Program
from whynan.capsule.tape.entries import Entry
from whynan.causes.handed import given
from whynan.diagnosis import Case
from whynan.errors import let_through

MOST = 4  # conditions followed at a time


@dataclass(slots=True)
class Count:
    """How often one argument of one module held a single value."""

    function: Any
    name: str
    since: int
    calls: int = 0
    held: torch.Tensor | int = 0  # counted where the ids live: nothing waits for a device
    before: str = ""  # the same in kept steps that lie apart
    varies: bool = False  # there it was not so

    @property
    def tells(self) -> bool:
        """Whether it sets some batches apart: a mask of ones in all of them is no condition."""
        return bool(self.calls) and (self.varies or self.calls == 1 or int(self.held) < self.calls)

    def text(self) -> str:
        """Say it in one line."""
        what = f"{self.name} of {type(self.function).__name__} held one value only"
        return f"{what} in {int(self.held)} of {self.calls} batches since step {self.since}{self.before}"


class Tally:
    """Counts from the first incident on, and in the healthy steps that were kept before it.

    Cost: nothing before an incident with such a condition, then one comparison per batch of ids; once, a forward pass of
    up to two kept steps.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.counts: list[Count] = []
        self._seen = 0  # the newest entry that was counted

    def learn(self, case: Case) -> None:
        """Follow the ids that were all the same in a bad step."""
        fresh = []
        for entry, name, tensor in given(case.program.entries, case.program.recorder.tape.alive):
            known = any(c.function is entry.fn and c.name == name for c in self.counts)
            if not known and len(self.counts) < MOST and isinstance(entry.fn, torch.nn.Module) and _is_ids(tensor) and bool(_single(tensor)):
                fresh.append(Count(entry.fn, name, case.step))
                self.counts.append(fresh[-1])
        if fresh:
            try:
                _look_back(fresh, case)
            except Exception as error:  # what was before is told beside it
                let_through(error)
        if self.counts:
            self.look()

    def look(self) -> None:
        """Count the batches of the step that ends, those that were not counted yet."""
        tape = self._recorder.tape
        seen, self._seen = max(self._seen, tape.rolled), tape.last
        for entry, name, tensor in given(list(tape), tape.alive):
            for count in self.counts:
                if entry.number > seen and _meant(count, entry, name, tensor):
                    count.calls += 1
                    count.held = count.held + _single(tensor).long()

    def lines(self) -> list[str]:
        """Say what was counted."""
        return [f"whynan: {count.text()}" for count in self.counts if count.tells]


def _look_back(counts: list[Count], case: Case) -> None:
    """Count in the kept healthy steps; those right before the incident move its beginning back."""
    steps = {step: _of_step(counts, program) for step, program in sorted(case.healthy.items()) if all(e.kind != "function" for e in program.entries)}
    joined = list(steps) == list(range(case.step - len(steps), case.step))
    for place, count in enumerate(counts):
        calls, held = (sum(found[place][n] for found in steps.values()) for n in (0, 1))
        if joined and calls:
            count.since, count.calls, count.held = min(steps), count.calls + calls, count.held + held
        elif calls:
            count.varies = held < calls
            count.before = f", and in {held} of {calls} in steps {', '.join(map(str, steps))} before it"


def _of_step(counts: list[Count], program: Program) -> list[tuple[int, int]]:
    """Play the forward pass of a kept step; for each count, how many batches it was given and how many held one value."""
    short = program.until_loss()
    with short.still(), torch.no_grad():
        run = short.play()
        found = [(c, _single(t)) for e, name, t in given(program.entries, run.made.get) for c in counts if _meant(c, e, name, t)]
    return [(sum(c is count for c, _ in found), sum(bool(single) for c, single in found if c is count)) for count in counts]


def _meant(count: Count, entry: Entry, name: str, tensor: torch.Tensor) -> bool:
    return count.function is entry.fn and count.name == name and _is_ids(tensor)


def _is_ids(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() > 1


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor == tensor.flatten()[0]).all()
