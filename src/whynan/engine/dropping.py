"""Leave no trace of a bad step: modules, weights, gradients and what the loop carries are as they were before it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from whynan.capsule.tape.facts import is_leaf
from whynan.capsule.unseen import unseen
from whynan.engine.recovering import Recovering
from whynan.engine.session import Session, parameters_of
from whynan.recovery.carried import DroppedStep
from whynan.tripwire.values import damage_of


@unseen
class Dropping:
    """Puts back what a step, or a micro-batch of it, has changed."""

    def __init__(self, session: Session, recovering: Recovering) -> None:
        self.session, self.recovering = session, recovering
        self.stale: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []  # gradients of a dropped step, and what was there before it
        self.before: dict[int, torch.Tensor] = {}  # gradients as the first backward pass of a bad step has found them
        self.places: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # gradients put in place of dropped ones

    def drop(self) -> None:
        """Leave no trace of this step's forward passes."""
        self.session.window.taken = "skipped"
        rewinds = [state.rewind for state in self.session.recorder.roots.latest_first()]
        for put_back in (*rewinds, self._put_weights_back, self.recovering.hold_averages, self.keep_carried):
            if not self.session.safely(functools.partial(_done, put_back), False):  # does not keep the others from it
                self.session.budget.unsure = True

    def drops_again(self) -> bool:
        """Drop a step whose batch was dropped before a rollback and comes again now; return whether it is one."""
        if not self.recovering.met_before():
            return False
        self.drop()
        return True

    def keep_carried(self) -> None:
        """Keep what the program carries in tensors of its own from what this step has made of it."""
        session = self.session
        if session.by_hand:
            return  # nobody knows where a step begins
        found = session.safely(lambda: DroppedStep(session.recorder, self._say_carried), None)
        if found is not None and found.made:  # else another optimizer of a step that was dropped before
            session.recorder.tape.dropped = found

    def _say_carried(self) -> None:
        self.session.journal.say_once("whynan: tensors that the loop itself carries from step to step are put back with the dropped step, each by itself")

    def _put_weights_back(self) -> None:
        """Undo what the program itself did to weights and buffers that are bad now: set from the first batch, projected or averaged after the last update."""
        for weight, saved in self.made_bad():
            with torch.no_grad():
                weight.copy_(saved)
            what = "weights" if weight.requires_grad else "buffers"
            self.session.journal.say_once(f"whynan: {what} that the program itself has made bad are put back to what they were before that")

    def made_bad(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the weights and buffers that the program itself has made bad in this step, with what they were before."""
        recorder = self.session.recorder
        buffers = {id(b) for root in recorder.roots.modules() for b in root.buffers()}
        for kept in recorder.tape.memory.written(self.session.window_start):
            weight, saved = kept.tensor, kept.saved
            own = (weight.requires_grad and is_leaf(weight) and self.session.trains(weight)) or id(weight) in buffers
            if saved is not None and own and damage_of(weight.detach()) and not damage_of(saved.detach()):
                yield weight, saved

    def dropped(self, optimizer: Any) -> None:
        """An optimizer was kept from its step: its gradients, and no other's, are those of what was dropped."""
        if optimizer is not None:
            self.stale += [(p, p.grad, self.before.pop(id(p), None)) for p in parameters_of(optimizer) if p.grad is not None]

    def keep_gradients(self) -> None:
        """A backward pass goes back from a loss that is bad: keep the gradients that a loop has not zeroed (it lets them decay)."""
        held = [p for optimizer in self.session.optimizers for p in parameters_of(optimizer) if p.grad is not None]
        self.before = {id(p): p.grad.detach().clone() for p in held if p.grad is not None}

    def free_stale(self) -> None:
        """A backward pass begins and nobody has zeroed the gradients of the dropped step (some optimizers do it in their step)."""
        for parameter, grad, before in self.stale:
            if parameter.grad is grad:
                parameter.grad = before
        self.stale.clear()

    def hold_places(self) -> None:
        """Clipping and unscaling want gradients: give them some where a dropped micro-batch is all there was.

        Of -0.0, which changes no bit of what is added to it.
        """
        for optimizer in self.session.optimizers:
            parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
            if all(p.grad is None for p in parameters):
                for parameter in parameters:
                    parameter.grad = torch.full_like(parameter, -0.0)
                self.places += [(p, p.grad) for p in parameters]

    def free_places(self) -> None:
        """A backward pass begins: what it does not reach has no gradient again."""
        for parameter, grad in self.places:
            if parameter.grad is grad:
                parameter.grad = None
        self.places.clear()


def _done(action: Callable[[], object]) -> bool:
    action()
    return True
