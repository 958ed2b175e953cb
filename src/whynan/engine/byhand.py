"""Writes to weights by the program itself: the updates of one without optimizers, and what a loop does between two backward passes of a step."""

from __future__ import annotations

from typing import Any

import torch

from whynan.capsule.tape import is_leaf, memory_of, tensors_of
from whynan.engine.acting import Acting
from whynan.engine.noticing import Noticing
from whynan.engine.session import Session, parameters_of, shape_of
from whynan.records import Symptom
from whynan.tripwire.checks import nonfinite


class ByHand:
    """Looks at gradients where no optimizer asks for it."""

    def __init__(self, session: Session, noticing: Noticing, acting: Acting) -> None:
        self.session, self.noticing, self.acting = session, noticing, acting
        self._weights: tuple[int, frozenset[int]] = (-1, frozenset())  # as known at a step: the memory of what optimizers train
        self._looked = (-1, 0)  # the step, and its backward passes, whose gradients were looked at for the sake of a write

    def may_write(self, target: torch.Tensor) -> bool:
        """A loose in-place write. After a bad backward pass one to a weight is left out: it is the update, or would hide the cause."""
        session = self.session
        if session.budget.observes:
            return True
        if not session.by_hand:
            return not session.window.backwards or session.window.told or not self._is_trained(target) or not self._is_bad()
        if not session.window.told or torch.is_grad_enabled():
            return True
        trained = target.requires_grad and is_leaf(target)  # whoever made it: `(0.1 * torch.randn(4)).requires_grad_()` is on the tape
        return not trained and session.recorder.tape.slot_of(target) is not None

    def _is_trained(self, target: torch.Tensor) -> bool:
        """Whether a write goes to the memory of a weight, be it through `.data`."""
        session = self.session
        if self._weights[0] != session.step_count:
            trained = (p for optimizer in session.optimizers for p in parameters_of(optimizer))
            self._weights = session.step_count, frozenset(map(memory_of, trained))
        return memory_of(target) in self._weights[1]

    def _is_bad(self) -> bool:
        """Whether the step that a weight is written in is known to be bad: with a weight moved by its gradient (SAM) the cause could not be seen any more."""
        session, window = self.session, self.session.window
        if window.symptom is None and self._looked != (session.step_count, window.backwards):
            self._looked = session.step_count, window.backwards
            for optimizer in session.optimizers:
                if window.symptom is None and all(p.is_cpu for p in parameters_of(optimizer)):
                    self.noticing.look_at_gradients(optimizer)
        return window.symptom is not None and window.symptom.place in ("loss", "gradient")

    def may_update(self) -> bool:
        """Whether an optimizer that is not torch's may make its update: not after a bad backward pass."""
        session = self.session
        session.stop_again()
        return not session.window.told or session.budget.observes

    def check_gradients(self) -> None:
        """A backward pass is over: look at the gradients of everything they can end in."""
        session = self.session
        bad = nonfinite((f"gradient of {shape_of(p)}", p.grad) for p in session.leaves() if p.grad is not None)
        self._settle(Symptom("gradient", bad[0][2].kind, bad[0][0]) if bad else None)

    def check_derivative(self, outputs: Any, result: Any) -> None:
        """`torch.autograd.grad` or `torch.func` gave gradients: look at them."""
        self.noticing.losses(outputs)
        self.session.window.backwards += 1
        self.noticing.check_loss(next(reversed(self.session.recorder.tape.entries.values()), None))
        bad = nonfinite(("gradient", t) for t in tensors_of(result))
        self._settle(Symptom("gradient", bad[0][2].kind, "gradient") if bad else None)

    def _settle(self, symptom: Symptom | None) -> None:
        session = self.session
        if symptom is not None and session.window.symptom is None:
            session.see(symptom)
        if session.window.symptom is not None and not session.window.told:
            self.acting.act(None)
        else:
            self.acting.write_metrics(None)
