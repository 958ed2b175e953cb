"""Infinities that weights hold on purpose: a transition that cannot be, a bound. They were there in a finite step, so they are no cause by themselves."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from whynan.capsule.snapshot import local


class Infinities:
    """Knows which infinities weights had in a finite step. Memory: a copy of each weight that has some."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()

    def note(self, weight: torch.Tensor) -> None:
        """The step that read this weight was finite."""
        self._known[weight] = local(weight).detach().clone()

    def forget(self, weight: torch.Tensor) -> None:
        """No step that was finite has computed with them."""
        self._known.pop(weight, None)

    def are_known(self, weight: torch.Tensor) -> bool:
        """Whether all that is not finite in a weight was there then."""
        values, known = local(weight).detach(), self._known.get(weight)
        return known is not None and known.shape == values.shape and bool((values.isfinite() | (values == known)).all())

    def unchanged(self) -> list[torch.Tensor]:
        """Return the weights of which this is so."""
        return [weight for weight in self._known if self.are_known(weight)]
