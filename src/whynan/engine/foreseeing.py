"""Early warning in the loop: feed it the numbers of a step, pass on what it says, act on a spike where that was asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from whynan.capsule.doors.outputs import Outputs
from whynan.engine.options import Options
from whynan.engine.session import Session
from whynan.engine.staging import Staging
from whynan.engine.standing import Standing
from whynan.records import Notice
from whynan.recovery.spikes import SpikePolicy, on_spike
from whynan.tripwire.early import EarlyWarning, has_spike
from whynan.tripwire.headroom import EVERY
from whynan.tripwire.spikes import Spike
from whynan.tripwire.stages import stages_from
from whynan.tripwire.tracking import limits_of

TOGETHER = 16  # steps whose numbers are looked at together where nothing is done about a spike: a warm cache is cheap


class Foreseeing:
    """Looks at loss, gradient norm and tracked values while everything is finite."""

    def __init__(self, session: Session, options: Options, standing: Standing, trace: Callable[[str, Spike, str, torch.optim.Optimizer], None]) -> None:
        self.session = session
        self.standing = standing
        self.trace = trace  # finds the line of an absurd step while it is still on the tape
        self.policy = SpikePolicy(options.spike)
        stages = stages_from(options.expect)
        limits = [*limits_of(options.track), *(limit for s in stages for limit in limits_of({name: b.track for name, b in s.tracked.items()}))]
        self.outputs = Outputs(session.recorder, limits) if any(limit.of_outputs for limit in limits) else None
        if self.outputs is not None:
            session.recorder.outputs = self.outputs
        self.early = EarlyWarning(options.track, self.policy is not SpikePolicy.OFF, self.outputs)
        self.acts = self.policy not in (SpikePolicy.WARN, SpikePolicy.OFF)
        self._tracks = bool(options.track)
        self.staging = Staging(session, stages, self.outputs) if stages else None
        self.follows = self._tracks or self.staging is not None or self.outputs is not None  # values of every step
        self.dtypes: tuple[torch.dtype | None, torch.dtype | None] = (None, None)  # of the loss and the gradient norm
        self._waiting: list[tuple[int, float | None, torch.Tensor | float | None, bool, torch.optim.Optimizer, torch.dtype | None]] = []
        self._curves: weakref.WeakKeyDictionary[torch.optim.Optimizer, str] = weakref.WeakKeyDictionary()  # the name of each
        self._named = 0  # how many got a name so far
        self._young = TOGETHER - 1  # until this step every number is looked at at once
        self._ceilings = (0.0, 0.0)  # sizes of loss and gradient norm that are looked at at once: every one, to begin with

    def met(self) -> None:
        """An optimizer was made: what is large for others says nothing of its numbers."""
        self._young = self.session.step_count + TOGETHER - 1
        self._ceilings = (0.0, 0.0)

    def before_update(self, optimizer: torch.optim.Optimizer) -> str:
        """Look at the numbers of a finite step; return what is to be done, nothing as a rule."""
        session = self.session
        window = session.window
        norm, loss, dead, dtype = window.norm, window.loss, False, None
        if type(norm) is float:
            size, seen = norm, True
        else:
            seen = norm is None or norm.is_cpu  # type: ignore[union-attr]
            size = float(norm) if norm is not None and seen else 0.0
        if window.losses:  # without one it is the rest of a step that was told
            dead, dtype = seen and size == 0.0, window.losses[-1].dtype
        if window.scaled or not seen:
            norm = None  # multiplied by a factor that says nothing of the gradient
        self._waiting.append((session.step_count, loss, norm, dead, optimizer, dtype))
        if self.acts or len(self._waiting) >= TOGETHER:
            taken = self.settle(before_update=True)
            self.standing.look(optimizer)
            return taken
        highest, largest = self._ceilings
        if size > largest or (loss is not None and abs(loss) > highest):
            self.settle(before_update=True)
        if session.step_count == 1:
            self.standing.look(optimizer)
        return ""

    def settle(self, before_update: bool = False) -> str:
        """Look at the numbers that were put off."""
        waiting, self._waiting = self._waiting, []
        taken = ""
        for step, loss, norm, dead, optimizer, dtype in waiting:
            self.standing.numbers(step, loss, dead, optimizer)
            norm_dtype = norm.dtype if isinstance(norm, torch.Tensor) else None
            notices = self.early.numbers(step, loss, None if norm is None else float(norm), self._curve(optimizer), dtype, norm_dtype)
            taken = self._pass_on(notices, before_update) if notices else ""
            if before_update and self.early.absurd is not None and step == self.session.step_count:
                self.trace(*self.early.absurd, taken, optimizer)
        if waiting:
            self.dtypes = (dtype, norm_dtype)
            self._ceilings = self.early.ceilings() if self.session.step_count >= self._young else (0.0, 0.0)
        return taken

    def late(self, step: int, loss: float, norm: float | None, optimizer: torch.optim.Optimizer) -> str:
        """Look at numbers that arrived one step late."""
        self.standing.numbers(step, loss, norm == 0, optimizer)
        self.standing.look(optimizer)
        notices = self.early.numbers(step, loss, norm, self._curve(optimizer))
        return self._pass_on(notices, before_update=False) if notices else ""

    def state(self, wait: bool = False) -> None:
        """Look at weights and tracked values."""
        session = self.session
        if self.staging is not None:
            self.staging.state(wait)
        notices: list[Notice] = []
        if self._tracks or wait or session.step_count % EVERY == 0:
            notices += self.early.state(session.step_count, session.recorder.roots.modules(), session.optimizers, wait)
        if self.outputs is not None:
            notices += self.outputs.end(session.step_count, wait)
        for notice in notices:
            session.journal.warning(notice)

    def _curve(self, optimizer: torch.optim.Optimizer) -> str:
        """Return the name of an optimizer's curve: every optimizer has one of its own, under one name for as long as it lives."""
        name = self._curves.get(optimizer)
        if name is None:
            self._name_curves(optimizer)
            name = self._curves[optimizer]
        return name

    def _name_curves(self, optimizer: torch.optim.Optimizer) -> None:
        """Number the optimizers that have no name yet; one that is the first and alone needs no number."""
        known = self.session.optimizers
        alone = not self._named and len(known) < 2
        for new in [*known, optimizer]:
            if new not in self._curves:
                self._curves[new] = "" if alone else f"optimizer {self._named}"
                self._named += 1
        self.early.keep(self._curves.values())

    def _pass_on(self, notices: list[Notice], before_update: bool) -> str:
        for notice in notices:
            self.session.journal.warning(notice, aloud=notice.severe or self.policy is not SpikePolicy.WARN)
        return on_spike(self.policy, before_update) if has_spike(notices) else ""
