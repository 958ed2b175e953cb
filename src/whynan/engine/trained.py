"""What a program trains, and what it only asks a gradient of: an input with `requires_grad` (a penalty, an attack, a force) is no weight."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from whynan.capsule.tape.facts import is_readable, memory_of
from whynan.tripwire.values import damage_of

EVERY = 64  # steps after which the leaves of a program without optimizers are looked at again
_Known = tuple["weakref.ref[torch.Tensor]", tuple[int, float]]


class Trained:
    """Knows the weights of programs without optimizers: they are there in step after step, and other in each.

    Cost: one sum per leaf in the first two steps and in one of 64.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def remember(self, leaves: Iterable[torch.Tensor], step: int) -> None:
        """Note what gradients end in, where this is a step to look."""
        if step % EVERY < 2:
            self._known = {key: known for key, known in self._known.items() if known[0]() is not None}
            for leaf in leaves:
                if self._of(leaf) is None and not damage_of(leaf.detach()):
                    self._known[id(leaf)] = weakref.ref(leaf), _value(leaf)

    def by_hand(self, tensor: torch.Tensor, leaves: Iterable[torch.Tensor]) -> bool:
        """Whether a program without optimizers trains a leaf: it was seen in an earlier step and is other now.

        Where none is, nothing is known and all are taken for weights.
        """
        if self._has_moved(tensor):
            return True
        return not any(map(self._has_moved, leaves))  # the first that has answers it

    def _has_moved(self, leaf: torch.Tensor) -> bool:
        return (known := self._of(leaf)) is not None and _value(leaf) != known

    def _of(self, leaf: torch.Tensor) -> tuple[int, float] | None:
        ref, value = self._known.get(id(leaf), (None, None))
        return value if ref is not None and ref() is leaf else None


def are_among(tensor: torch.Tensor, weights: Iterable[torch.Tensor]) -> bool:
    """Whether a tensor is one of some weights, or lives in the memory of one."""
    place = memory_of(tensor)
    return any(weight is tensor or memory_of(weight) == place for weight in weights)


def _value(leaf: torch.Tensor) -> tuple[int, float]:
    """Return something by which to tell that a leaf was updated, also past its version counter."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        total = leaf.detach().sum() if is_readable(leaf) else torch.zeros(())
        return leaf._version, float(total.real if total.is_complex() else total)
