"""Notice a training that stands still, from numbers that are read anyway.

No gradient for 20 steps of an optimizer in a row, or a learning rate of 0 for 32: every number is finite, and nothing is
learned. Weights in half precision are followed where their gradient is largest.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from whynan.records import number_of

STILL = 20  # steps of an optimizer in a row without gradient
RESTING = 32  # steps of an optimizer in a row with a learning rate of 0
UNMOVED = 32  # steps over which no weight that was to move has moved
SAMPLES = 8  # weights whose movement is followed, and twice as many elements of each
FEWEST = 8  # elements with a gradient that say something of all of them
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Still:
    """What stands still, and since when."""

    kind: str  # gradient | rate | skipped | rounding | average
    since: int
    loss: float | None = None
    same: bool = False  # the loss has not moved by a bit either
    detail: str = ""
    site: Any = None  # of the capsule: who reads a bad running value
    apart: bool = False  # another optimizer learns
    elsewhere: bool = False  # the step on the tape is that of another optimizer


class Stillness:
    """The numbers of one optimizer, counted in its own steps. Cost: two comparisons a step.

    >>> watch = Stillness()
    >>> [(s.kind, s.since, s.same) for step in range(30) if (s := watch.see(step, 0.5, True, 1e-3))]
    [('gradient', 0, True)]
    """

    def __init__(self) -> None:
        self.last = -1  # the step that was seen last
        self._since = self._rests = 0
        self._dead = self._rested = 0  # steps in a row without gradient, and with a rate of 0
        self._loss: float | None = None
        self._same = True
        self._told: set[str] = set()

    @property
    def learns(self) -> bool:
        """Whether the last step had a gradient and a rate, as far as is known."""
        return not self._dead and not self._rested

    def see(self, step: int, loss: float | None, dead: bool, lr: float | None) -> Still | None:
        """Take the numbers of one step, and whether it is known to have no gradient."""
        self.last = step
        loud = loss is not None and not math.isfinite(loss)  # an incident of its own; a loop that zeroes its gradients has none
        if not dead or loud:
            self._dead = 0
            self._told.discard("gradient")
        else:
            if not self._dead:
                self._since, self._loss, self._same = step, loss, True
            self._dead += 1
            self._same = self._same and loss == self._loss
        if lr != 0:
            self._rested = 0
            self._told.discard("rate")
        else:
            self._rests = self._rests if self._rested else step
            self._rested += 1
        if self._dead >= STILL and "gradient" not in self._told:
            self._told.add("gradient")
            return Still("gradient", self._since, loss, self._same)
        if self._rested >= RESTING and "rate" not in self._told:
            self._told.add("rate")
            return Still("rate", self._rests, loss)
        return None

    def ask_again(self, kind: str) -> None:
        """What was said was not told, for a reason that may pass: say it again after as many steps."""
        self._told.discard(kind)
        if kind == "rate":
            self._rested = 1
        else:
            self._dead = 1


class Unmoved:
    """Weights in half precision that keep every bit although an update for them is due: the updates round away.

    Judged by the elements with the largest gradients, taken at several looks: rows of a table that no batch touches, and
    weights without gradient, say nothing. Cost: two reductions of eight gradients a look, one wait for a device.
    """

    def __init__(self) -> None:
        self._samples: list[_Sample] = []
        self._since = 0
        self._told = False

    def see(self, step: int, optimizer: torch.optim.Optimizer) -> Still | None:
        """Look at an optimizer whose gradients are there and whose update is to come."""
        if any(sample.moved() for sample in self._samples):
            self._samples.clear()
            self._told = False
        if self._told:
            return None
        weights = list(_halves(optimizer))
        if self._samples and step - self._since >= UNMOVED and (words := self._words(len(weights))):
            self._told = True
            return Still("rounding", self._since, detail=words)
        self._since = self._since if self._samples else step
        self._samples = self._samples[-4 * SAMPLES :] + [_Sample.of(p) for p in weights[:: max(1, len(weights) // SAMPLES)][:SAMPLES]]
        return None

    def _words(self, weights: int) -> str:
        """Say what has not moved; nothing where that is too little, or one tensor of several."""
        due = [(id(sample.weight()), count) for sample in self._samples if (count := int(sample.due.sum()))]
        tensors, elements = len({weight for weight, _ in due}), sum(count for _, count in due)
        if elements < FEWEST or (tensors == 1 and weights > 1):
            return ""
        dtype = str(self._samples[0].before.dtype).removeprefix("torch.")
        return f"the weights are {dtype}, and none of {elements} elements with the largest gradients has moved ({tensors} tensor{'s' * (tensors > 1)})"


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some elements of a weight, as they were before an update."""

    weight: weakref.ref[torch.Tensor]
    size: int
    places: torch.Tensor
    due: torch.Tensor  # which of them have a gradient
    before: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> _Sample:
        """Take the elements with the largest gradients, up and down."""
        assert weight.grad is not None
        width = min(SAMPLES, weight.numel())
        rows = weight.grad.detach().flatten()[: weight.numel() // width * width].view(-1, width)
        most, least = rows.max(0), rows.min(0)
        columns = torch.arange(width, device=rows.device)
        places = torch.cat([most.indices * width + columns, least.indices * width + columns])
        due = torch.cat([most.values > 0, least.values < 0])
        return cls(weakref.ref(weight), weight.numel(), places, due, weight.detach().flatten()[places])

    def moved(self) -> bool:
        """Whether one that was to move has moved, or nobody can tell any more."""
        weight = self.weight()
        if weight is None or weight.dtype != self.before.dtype or weight.device != self.before.device or weight.numel() != self.size:
            return True
        return bool(((weight.detach().flatten()[self.places] != self.before) & self.due).any())


def _halves(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the weights in half precision that are trained in this step."""
    for group in optimizer.param_groups:
        for weight in group["params"] if number_of(group.get("lr")) != 0 else ():
            grad = weight.grad if weight.requires_grad and weight.dtype in _HALF and weight.numel() else None
            if type(grad) is torch.Tensor and grad.layout is torch.strided:
                yield weight
