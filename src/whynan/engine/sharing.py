"""Several optimizers: those that step from one backward pass share its fate.

Muon for the matrices and AdamW for the rest go back once and step twice. A gradient that is bad for the second must be
seen before the first has stepped, and once the first was kept from its step so is the second. The two optimizers of a
GAN go back each for itself: what is bad for one does not concern the other.
"""

from __future__ import annotations

import torch

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
        self.fate = self.fate or fate

    def drops(self) -> bool:
        """Whether the step that comes now belongs to a backward pass that was dropped already; it is dropped alike."""
        if self.fate and not self.session.window.backwards:
            self.session.window.taken = self.fate
            return True
        return False

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
