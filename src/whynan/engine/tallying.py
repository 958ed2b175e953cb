"""How often the condition of an incident comes back, in batches that failed and in those that did not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from whynan.capsule.recorder import Recorder
from whynan.causes.handed import given
from whynan.diagnosis import Case

MOST = 4  # conditions followed at a time


@dataclass(slots=True)
class Count:
    """How often one argument of one module held a single value."""

    function: Any
    name: str
    since: int
    calls: int = 0
    held: torch.Tensor | int = 0  # counted where the ids live: nothing waits for a device

    def text(self) -> str:
        """Say it in one line."""
        return f"{self.name} of {type(self.function).__name__} held one value only in {int(self.held)} of {self.calls} batches since step {self.since}"


class Tally:
    """Counts from the first incident on; before it there is nothing to count.

    Cost: nothing before an incident with such a condition, then one comparison per batch of ids.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._counts: list[Count] = []
        self._seen = 0  # the newest entry that was counted

    def learn(self, case: Case) -> None:
        """Follow the ids that were all the same in a bad step."""
        for entry, name, tensor in given(case.program.entries, case.program.recorder.tape):
            known = any(c.function is entry.fn and c.name == name for c in self._counts)
            if not known and len(self._counts) < MOST and isinstance(entry.fn, torch.nn.Module) and _is_ids(tensor) and bool(_single(tensor)):
                self._counts.append(Count(entry.fn, name, case.step))
        self.look()

    def look(self) -> None:
        """Count the batches of the step that ends, those that were not counted yet."""
        seen, self._seen = self._seen, self._recorder.tape.last
        if not self._counts:
            return
        for entry, name, tensor in given(list(self._recorder.tape), self._recorder.tape):
            for count in self._counts:
                if entry.number > seen and count.function is entry.fn and count.name == name and _is_ids(tensor):
                    count.calls += 1
                    count.held = count.held + _single(tensor).long()

    def lines(self) -> list[str]:
        """Say what was counted."""
        return [f"whynan: {count.text()}" for count in self._counts if count.calls]


def _is_ids(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() > 1


def _single(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor == tensor.flatten()[0]).all()
