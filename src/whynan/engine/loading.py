"""State is loaded: what comes in is looked at, and what it overrides is remembered."""

from __future__ import annotations

from typing import Any

import torch

from whynan.capsule.loads import versions_of
from whynan.capsule.sites import take_site
from whynan.capsule.unseen import unseen
from whynan.causes import rates
from whynan.engine.noticing import Noticing
from whynan.engine.session import Session
from whynan.recovery.place import rank_here


@unseen
class Loading:
    """Stands at `load_state_dict` of models, optimizers and schedulers."""

    def __init__(self, session: Session, noticing: Noticing) -> None:
        self.session, self.noticing = session, noticing
        self.overrides = rates.Overrides()

    def loading(self, owner: Any) -> object:
        """State is about to be loaded: remember the rates the script gave, or which weights are written to."""
        if isinstance(owner, torch.nn.Module):
            return self.session.guarded(lambda: versions_of(owner))
        return self.session.guarded(lambda: rates.before_load(owner))

    def loaded(self, owner: Any, before: object = None) -> None:
        """State was loaded: look at it before the next step."""
        if isinstance(owner, torch.nn.Module | torch.optim.Optimizer):
            self.noticing.made_or_loaded(owner)
        if isinstance(owner, torch.nn.Module) and isinstance(before, dict):
            self.session.guarded(lambda: self.session.recorder.beside.loads.note(owner, before, take_site(2)))
        if isinstance(before, rates.Rates):
            self.session.guarded(lambda: self.overrides.loaded(owner, before, take_site(2)))

    def tell_overrides(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Tell of rates that the script gave and that a checkpoint has overridden, as soon as they are used."""
        for override in self.overrides.due(optimizer):
            self.session.journal.incident(rates.incident(override, self.session.step_count), self.session.budget.action("observed"), tell=not rank_here())
