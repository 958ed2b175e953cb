"""Steps that are read late: the kernel skips by a flag on the device, and the host looks when the next step comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from whynan.capsule.unseen import unseen
from whynan.engine.acting import Acting
from whynan.engine.foreseeing import Foreseeing
from whynan.engine.noticing import Noticing
from whynan.engine.recovering import Recovering
from whynan.engine.scaling import Scaling
from whynan.engine.session import Session, parameters_of, rate_of
from whynan.engine.sharing import Sharing
from whynan.recovery.followers import Followers
from whynan.tripwire.late import LateFlag, can_wait, is_bad, late_symptom


@unseen
class Waiting:
    """Lets fused optimizers on a GPU step without the host waiting for their numbers."""

    def __init__(
        self,
        session: Session,
        noticing: Noticing,
        acting: Acting,
        followers: Followers,
        recovering: Recovering,
        sharing: Sharing,
        scaling: Scaling,
        foreseeing: Foreseeing,
        finish: Callable[[Any, bool], None],
    ) -> None:
        self.session, self.noticing, self.acting = session, noticing, acting
        self.followers, self.recovering, self.sharing = followers, recovering, sharing
        self.scaling, self.foreseeing, self.finish = scaling, foreseeing, finish
        self.flag: LateFlag | None = None

    @property
    def pending(self) -> bool:
        """Whether the last step is not known yet."""
        return self.flag is not None and bool(self.flag.pending)

    def may_wait(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step can be read late."""
        if self.session.window.symptom is not None or not can_wait(optimizer) or self.session.window.several:
            return False
        if self.noticing.unchecked:
            self.session.guarded(lambda: self.noticing.look_at_state(judged=False))
        return self.session.window.symptom is None and not self.noticing.unchecked and self.nobody_else(optimizer)

    def nobody_else(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether nothing else must be kept from moving before the next backward pass."""
        alone = not self.followers.averages and not self.recovering.averages and not self.sharing.partners(optimizer) and not self.sharing.drops(optimizer)
        if not alone or self.recovering.met_before():
            return False
        return _has_state(optimizer) and not self.noticing.busy_buffers() and not self.session.recorder.tape.carries

    def step(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any], found: Any = None) -> Any:
        """Let the kernel skip by a flag on the device; the host reads it when the next step comes."""
        self.session.stop_again()
        late = self.flag = self.flag or LateFlag()
        late.flag = None
        rolled_back = self.session.guarded(lambda: late.read(self._values)) == "rolled back"
        if rolled_back:
            self.session.window.taken = "rolled back"
            self.finish(optimizer, False)  # its gradients are those of the state that was left
            return None
        self.session.guarded(lambda: self._arm(late, optimizer, found))
        scaled, skips = found is not None, not self.session.budget.observes
        if late.flag is not None and skips:
            optimizer.found_inf = late.flag  # type: ignore[attr-defined]
        try:
            result = call(optimizer, *args, **kwargs)
        finally:
            if not scaled and late.flag is not None and skips:
                del optimizer.found_inf  # type: ignore[attr-defined]
        self.finish(optimizer, True)
        return result

    def _arm(self, late: LateFlag, optimizer: torch.optim.Optimizer, found: Any) -> None:
        window = self.session.window
        window.late = True
        norm = None if found is not None else self.noticing.norm_of(optimizer)
        assert not isinstance(norm, float)  # gradients on the device have their norm there
        if norm is not None or window.losses:
            context = (dict(self.session.recorder.tape.entries), optimizer, self.scaling.current if found is not None else None)
            late.arm(window.losses, norm, self.session.step_count, context, found)
            self.scaling.bad_loss = late.bad_loss if found is not None else None
            self.scaling.waits = found is not None

    def _values(self, step: int, loss: float, norm: float, context: Any) -> str:
        entries, optimizer, scaler = context
        self.session.journal.metrics(step, loss, norm if scaler is None else None, rate_of(optimizer), None)
        if not is_bad(loss, norm):
            self.session.budget.healthy()
            self.scaling.settled()
            return self._spike(self.foreseeing.late(step, loss, norm if scaler is None else None, optimizer))
        symptom = late_symptom(loss, norm) if scaler is None else self.scaling.late(step, loss, entries, optimizer, scaler)
        return "" if symptom is None else self.acting.late(step, symptom, entries, optimizer, scaler)

    def _spike(self, taken: str) -> str:
        if taken == "stopped":
            self.session.stop(f"stopped at step {self.session.step_count}: a spike of the loss or the gradient norm")
        if taken == "rolled back" and self.recovering.possible:
            self.recovering.roll_back(late=True)
            return taken
        return ""

    def settle(self) -> None:
        """Read what is pending."""
        if self.flag is not None:
            self.flag.read(self._values)


def _has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether nothing is new to an optimizer: a fused step that skips on the device leaves new state without values (SGD's momentum)."""
    return sum(p.grad is not None for p in parameters_of(optimizer)) <= len(optimizer.state)
