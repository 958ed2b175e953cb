"""Notice a training that stands still, from numbers that are read anyway.

No gradient for 20 steps in a row, or a learning rate of 0 for 32: every number is finite, and nothing is learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

STILL = 20  # steps in a row without gradient
RESTING = 32  # steps in a row with a learning rate of 0


@dataclass(frozen=True, slots=True)
class Still:
    """What stands still, and since when."""

    kind: str  # gradient | rate | skipped | rounding | average
    since: int
    loss: float | None = None
    same: bool = False  # the loss has not moved by a bit either
    detail: str = ""
    site: Any = None  # of the capsule: who reads a bad running value


class Stillness:
    """The numbers of one optimizer. Cost: two comparisons a step.

    >>> watch = Stillness()
    >>> [s for step in range(30) if (s := watch.see(step, 0.5, True, 1e-3))]
    [Still(kind='gradient', since=0, loss=0.5, same=True, detail='', site=None)]
    """

    def __init__(self) -> None:
        self._since: int | None = None
        self._rests: int | None = None
        self._loss: float | None = None
        self._same = True
        self._told: set[str] = set()

    def see(self, step: int, loss: float | None, dead: bool, lr: float | None) -> Still | None:
        """Take the numbers of one step, and whether it is known to have no gradient."""
        loud = loss is not None and not math.isfinite(loss)  # an incident of its own; a loop that zeroes its gradients has none
        if not dead or loud:
            self._since = None
            self._told.discard("gradient")
        elif self._since is None:
            self._since, self._loss, self._same = step, loss, True
        else:
            self._same = self._same and loss == self._loss
        if lr != 0:
            self._rests = None
            self._told.discard("rate")
        elif self._rests is None:
            self._rests = step
        if self._since is not None and step - self._since >= STILL - 1 and "gradient" not in self._told:
            self._told.add("gradient")
            return Still("gradient", self._since, loss, self._same)
        if self._rests is not None and step - self._rests >= RESTING - 1 and "rate" not in self._told:
            self._told.add("rate")
            return Still("rate", self._rests, loss)
        return None
