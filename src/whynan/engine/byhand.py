"""Programs without optimizers: every backward pass is a step, and the writes after it are the update."""

from __future__ import annotations

from typing import Any

import torch

from whynan.capsule.tape import tensors_of
from whynan.engine.acting import Acting
from whynan.engine.noticing import Noticing
from whynan.engine.session import Session, shape_of
from whynan.records import Symptom
from whynan.tripwire.checks import nonfinite


class ByHand:
    """Looks at gradients where no optimizer asks for it."""

    def __init__(self, session: Session, noticing: Noticing, acting: Acting) -> None:
        self.session, self.noticing, self.acting = session, noticing, acting

    def may_write(self, target: torch.Tensor) -> bool:
        """A loose in-place write. In programs without optimizers, after a bad backward, it is the update: leave it out."""
        session = self.session
        if not session.by_hand or not session.window.told or torch.is_grad_enabled() or session.budget.observes:
            return True
        trained = target.requires_grad and target.is_leaf  # whoever made it: `(0.1 * torch.randn(4)).requires_grad_()` is on the tape
        return not trained and session.recorder.tape.slot_of(target) is not None

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
