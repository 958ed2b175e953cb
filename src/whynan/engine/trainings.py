"""Which steps belong to one training: a program may train a second model when it has done with the first."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from whynan.tripwire.checks import parameters_of

MOST = 64  # trainings that are remembered


@dataclass(slots=True)
class Training:
    """The steps that one optimizer made, or several one after the other on the same weights."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    weights: list[weakref.ref[torch.Tensor]]
    first: int
    last: int

    def shares(self, weights: set[int]) -> bool:
        """Whether it trains one of these weights."""
        return any((tensor := ref()) is not None and id(tensor) in weights for ref in self.weights)


class Trainings:
    """All trainings of a run so far.

    Cost: two look-ups a step.
    """

    def __init__(self) -> None:
        self._known: dict[int, Training] = {}

    def stepped(self, step: int, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was about to make a step, or made it."""
        self._of(step, optimizer).last = step

    def since(self, step: int, optimizer: torch.optim.Optimizer) -> int:
        """Return the first step after all trainings that were over when that of an optimizer began."""
        own = self._of(step, optimizer)
        return max((t.last + 1 for t in self._known.values() if t.last < own.first), default=0)

    def _of(self, step: int, optimizer: torch.optim.Optimizer) -> Training:
        known = self._known.get(id(optimizer))
        if known is None or known.optimizer() is not optimizer:
            known = self._known[id(optimizer)] = self._begun(step, optimizer)
        return known

    def _begun(self, step: int, optimizer: torch.optim.Optimizer) -> Training:
        """Begin a training, or go on with one: a new optimizer for the same weights takes its place if the old one is gone."""
        weights = parameters_of(optimizer)
        same = {key: t for key, t in self._known.items() if t.shares(set(map(id, weights)))}
        for key in [key for key, t in same.items() if t.optimizer() is None] + list(self._known)[:-MOST]:
            self._known.pop(key, None)
        return Training(weakref.ref(optimizer), [weakref.ref(p) for p in weights], min([step, *(t.first for t in same.values())]), step)
