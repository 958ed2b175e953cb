"""Several optimizers: those that step from one backward pass share its fate.

Muon for the matrices and AdamW for the rest go back once and step twice. A gradient that is bad for the second must be
seen before the first has stepped, and once the first was kept from its step so is the second. The two optimizers of a
GAN go back each for itself: what is bad for one does not concern the other.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from whynan.capsule.tape.facts import memory_of
from whynan.engine.session import Session, parameters_of, symptom_of
from whynan.records import Symptom
from whynan.tripwire.checks import gradients, nonfinite
from whynan.tripwire.values import damaged


class Sharing:
    """Learns which optimizers step from the same backward pass.

    Cost: nothing with one optimizer; with several that share, one look at the gradients of the others.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._stepped: list[int] = []  # optimizers that stepped since the last backward pass
        self._apart: set[frozenset[int]] = set()
        self.fate = ""  # what was done about those that were kept from their step
        self._held: dict[int, list[_Mark]] = {}  # the gradients that each optimizer had when the first was kept from it

    def met(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made: bad gradients that others hold by now were left by a pass from before it, which it has no part in.

        Cost: one look at the gradients of the others.
        """
        new = id(optimizer)
        self._apart = {pair for pair in self._apart if new not in pair}  # known of another with this number
        for other in self.session.optimizers:
            made = hasattr(other, "param_groups")  # not while it makes this one inside it
            if made and other is not optimizer and any(damaged(gradients(parameters_of(other)))):
                self._apart.add(frozenset((new, id(other))))

    def went_back(self) -> None:
        """A backward pass begins: whoever has not stepped since the last one does not step along with those who have."""
        if self.session.has_several:
            for first in self._stepped:
                self._apart.update(frozenset((first, id(other))) for other in self.session.optimizers if id(other) not in self._stepped)
        self._stepped.clear()
        self.fate = ""

    def finished(self, optimizer: torch.optim.Optimizer, fate: str) -> None:
        """An optimizer stepped or was kept from it."""
        self._stepped.append(id(optimizer))
        if fate and not self.fate:
            self.fate = fate
            self._held = {id(other): _marks(other) for other in self.session.optimizers}

    def drops(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the step that comes now is made from gradients that were dropped already; it is dropped alike.

        Gradients can be made anew without a backward pass: by `autograd.grad`, by `torch.func`, by hand.
        """
        if not self.fate or self.session.window.backwards:
            return False
        if self._gives_anew(optimizer):
            self.went_back()
            return False
        self.session.window.taken = self.fate
        return True

    def _gives_anew(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer has other gradients than when a step was dropped. One that has not stepped since may have clipped its own."""
        held, now = self._held.get(id(optimizer), []), _marks(optimizer)
        if len(held) != len(now) or any(a.ref is not b.ref or a.memory != b.memory for a, b in zip(held, now, strict=True)):
            return True
        return id(optimizer) in self._stepped and any(a.version != b.version for a, b in zip(held, now, strict=True))

    def partners(self, optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
        """Return who may step after this one from the same gradients."""
        if not self.session.has_several:
            return []
        others = [o for o in self.session.optimizers if o is not optimizer and id(o) not in self._stepped]
        return [o for o in others if frozenset((id(optimizer), id(o))) not in self._apart]

    def symptom(self, optimizer: torch.optim.Optimizer) -> Symptom | None:
        """Return what is wrong with the gradients of the partners."""
        for partner in self.partners(optimizer):
            bad = nonfinite(self.session.named_gradients(partner))
            if bad:
                return symptom_of("gradient", bad)
        return None


class _Mark(NamedTuple):
    """Something by which to tell that a gradient is another, or was written to, without holding it."""

    ref: weakref.ref[torch.Tensor] | None  # the same one as long as the tensor lives
    memory: int
    version: int


def _marks(optimizer: torch.optim.Optimizer) -> list[_Mark]:
    grads = [p.grad for p in parameters_of(optimizer)]
    return [_Mark(None, 0, 0) if grad is None else _Mark(weakref.ref(grad), memory_of(grad), grad._version) for grad in grads]
