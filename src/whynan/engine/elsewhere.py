"""Optimizers that step where nothing is recorded: in a hook of the backward pass, in a compiled function, in another thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from whynan.capsule.unseen import unseen
from whynan.engine.acting import Acting
from whynan.engine.regular import Regular
from whynan.engine.session import Session, symptom_of
from whynan.tripwire.checks import nonfinite


@unseen
class Elsewhere:
    """Stands at such steps."""

    def __init__(self, session: Session, acting: Acting, regular: Regular, finish: Callable[[Any, bool], None]) -> None:
        self.session, self.recorder, self.acting, self.regular, self.finish = session, session.recorder, acting, regular, finish
        self.in_backward = False
        self.stepped: list[tuple[torch.optim.Optimizer, bool]] = []  # inside the backward pass that runs, and whether the update was made
        self.moves_here: Callable[[], bool] = lambda: False  # whether watching goes on in the thread that asks
        self.switch_off: Callable[[], None] = lambda: None

    def step(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """An optimizer steps where nothing is recorded: in a hook of the backward pass, or in another thread."""
        session = self.session
        if not self.recorder.mine:
            return self._step_in_another_thread(call, optimizer, args, kwargs)
        if not self.in_backward:
            if not self.recorder.replaying and not self.regular.keeping:
                session.journal.say_once("whynan: an optimizer steps inside a compiled function or a module; that step is not watched")
            return call(optimizer, *args, **kwargs)
        session.window.inside = True
        if session.window.symptom is None:
            bad = session.guarded(lambda: nonfinite(session.named_gradients(optimizer)))
            if bad:
                session.see(symptom_of("gradient", bad))
        made = session.window.symptom is None or session.budget.observes
        self.stepped.append((optimizer, made))
        return call(optimizer, *args, **kwargs) if made else None

    def _step_in_another_thread(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Watch that thread from here on; where another one trains already, watch none: a replay would disturb the other."""
        session, moved = self.session, self.moves_here()
        if torch._C._current_autograd_node() is not None:
            session.journal.say_once("whynan: an optimizer steps in a thread of the backward pass; that step is not watched")
        elif not moved and not self.recorder.replaying:
            session.journal.say_once("whynan: a second thread trains, which is not supported: watching is off, training goes on")
            self.switch_off()
        result = call(optimizer, *args, **kwargs)
        if moved:
            session.next_step()
        return result

    def settle(self) -> None:
        """Optimizers stepped inside the backward pass: settle that step now."""
        (*others, (optimizer, made)), self.stepped = self.stepped, []
        window = self.session.window
        if window.symptom is not None and not window.told:
            self.acting.act(optimizer)
        for other, moved in others:
            self.acting.followers.stepped(other, moved)
            if not moved:
                self.acting.dropping.dropped(other)
        self.finish(optimizer, made)
