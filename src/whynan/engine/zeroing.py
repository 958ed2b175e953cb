"""Gradients are dropped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from whynan.capsule.unseen import unseen
from whynan.engine.dropping import Dropping
from whynan.engine.leaving import Leaving
from whynan.engine.session import Session, parameters_of


@unseen
class Zeroing:
    """Stands at `zero_grad`."""

    def __init__(self, session: Session, leaving: Leaving, dropping: Dropping) -> None:
        self.session, self.recorder, self.leaving, self.dropping = session, session.recorder, leaving, dropping

    def zeroed(self, call: Callable[..., Any], owner: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Gradients are dropped; a pending symptom that was never stepped on is told now."""
        session = self.session
        if self.recorder.tape.last > session.window_start or session.window.symptom is not None or self.dropping.stale:
            session.guarded(lambda: self._note(owner))
        call(owner, *args, **kwargs)

    def _note(self, owner: Any) -> None:
        window = self.session.window
        if window.symptom is not None and not window.told and window.backwards:
            self.leaving.turned_away(zeroed=True)
        self.dropping.stale.clear()
        newest = next(reversed(self.recorder.tape.entries), 0)
        if newest > self.session.window_start:  # else the step has not begun: a replay starts without gradients anyway
            tensors = owner.parameters() if isinstance(owner, torch.nn.Module) else parameters_of(owner)
            entry = self.recorder.note("zero", functools.partial(_drop_gradients, list(tensors)))
            self.recorder.tape.add(entry, None)


def _drop_gradients(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None
