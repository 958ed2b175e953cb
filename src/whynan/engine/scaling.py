"""Gradient scalers: their own skips are normal life, a fault under them is not, and a dropped step leaves them alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from whynan.capsule.replay import Program
from whynan.capsule.tape.entries import Entry
from whynan.capsule.tape.needs import needed_for
from whynan.capsule.unseen import unseen
from whynan.diagnosis import Case, diagnose
from whynan.engine.acting import Acting
from whynan.engine.gathering import gather
from whynan.engine.noticing import Noticing
from whynan.engine.session import Session, parameters_of, symptom_of
from whynan.engine.sharing import Sharing
from whynan.engine.together import Together, finite
from whynan.records import Symptom
from whynan.tripwire.checks import nonfinite
from whynan.tripwire.late import late_symptom

OF_THE_SCALE = ("WN503", "WN202", "WN203", "WN606", "WN802", "WN901")  # what an overflow looks like
IN_A_ROW = 4  # overflows of a scale that does not settle
FOR_EVER = 100  # overflows in a row that no sane first scale takes to settle


@unseen
class Scaling:
    """Follows the gradient scalers of a run."""

    def __init__(self, session: Session, noticing: Noticing, acting: Acting, together: Together, sharing: Sharing, finish: Callable[[Any, bool], None]) -> None:
        self.session, self.noticing, self.acting, self.together, self.sharing, self.finish = session, noticing, acting, together, sharing, finish
        self.overflows = 0  # in a row
        self.counted = 0  # in all
        self._collapsed = False
        self._ever = False  # a scaled step was made
        self._held: set[int] = set()  # optimizers whose step we dropped: the scale must not move for them
        self._before: tuple[Any, torch.Tensor, torch.Tensor] | None = None  # scaler, scale, growth tracker before the last update
        self._put_back = False
        self.current: Any = None  # the scaler whose step is running
        self.waits = False  # its optimizer skips by a flag on the device
        self.bad_loss: torch.Tensor | None = None  # of the step read late, on the device

    def scaled(self, scaler: Any, loss: Any) -> None:
        """A gradient scaler multiplies the loss: the unscaled one is what counts."""
        self.session.window.scaled = self.session.window.noted = True
        self.acting.recovering.scalers.add(scaler)
        self.session.guarded(lambda: self.acting.recovering.met(scaler))
        self.session.window.scale = scaler.get_scale() if not torch.cuda.is_initialized() else None
        self.session.guarded(lambda: self.noticing.losses(loss))

    def step(self, call: Callable[..., Any], scaler: Any, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`scaler.step(optimizer)`."""
        session = self.session
        if self.sharing.drops(optimizer):
            self._held.add(id(optimizer))
            self.finish(optimizer, False)
            return None
        if session.window.symptom is None:
            session.window.norm, session.window.clipped = None, frozenset(id(p) for p in parameters_of(optimizer))
        self.current = scaler
        steps, applied = session.step_count, session.applied
        result = session.recorder.suspended(_Resuming(session, call), scaler, optimizer, *args, **kwargs)
        if self.waits:
            self.waits = False  # whether the step was made is known when its flag is read
        elif session.applied > applied:
            self.settled()
        elif session.step_count > steps:
            self._held.add(id(optimizer))
        else:
            session.guarded(lambda: self._skipped(optimizer))
        return result

    def _skipped(self, optimizer: Any) -> None:
        """The scaler found an infinite gradient and kept the optimizer from its step."""
        self.blames(optimizer)
        self.finish(optimizer, False)

    def blames(self, optimizer: Any) -> bool:
        """Look into a step that the scaler skips; return whether it is dropped as bad, scale and all."""
        window, scaler = self.session.window, self.current
        if self.acting.dropping.drops_again():
            self._held.add(id(optimizer))
            return True
        if not window.counted:
            window.counted = True
            self._look(scaler, optimizer)
        if window.symptom is None or window.told:
            return False
        collapse = window.symptom.place == "scaler"
        taken = self.acting.act(optimizer, scaler)
        dropped = taken == "rolled back" or (taken == "skipped" and not collapse)
        if dropped:
            self._held.add(id(optimizer))
        return dropped

    def _look(self, scaler: Any, optimizer: Any) -> None:
        window = self.session.window
        if window.symptom is None and window.loss is None:
            self.noticing.look_at_losses()  # the scaler has waited for the device already
        self.together.begin(optimizer, lambda: True)
        if not self.together.all_skip() or self._skips_alone(optimizer):
            window.symptom = window.symptom or self._of_gradients(optimizer)
        elif not self.together.any(window.symptom is not None or self.together.apart.left is not None):
            self._count(scaler, optimizer)
            self.together.any(window.symptom is not None)

    def _skips_alone(self, optimizer: Any) -> bool:
        """Whether the scaler skips on this rank only: what it found was born in averaged gradients."""
        window = self.session.window
        if window.symptom is not None or not self.together.apart.were_finite():
            return False
        window.symptom = self._of_gradients(optimizer)
        if self.together.stands_apart():
            return True
        window.symptom = None
        return False

    def _of_gradients(self, optimizer: Any) -> Symptom:
        bad = nonfinite(self.session.named_gradients(optimizer))
        return symptom_of("gradient", bad) if bad else Symptom("gradient", "inf", "gradient")

    def _count(self, scaler: Any, optimizer: Any) -> None:
        """Tell an overflow of the scale from a fault of the program: the fault stays when the scale is 1."""
        session = self.session
        self.overflows += 1
        self.counted += 1
        symptom = self._of_gradients(optimizer)
        if symptom.name == "gradient" and not self.together.differ():
            return
        scale = scaler.get_scale()
        if not math.isfinite(scale):
            session.see(replace(symptom, place="scaler", name="scale", detail=f"the scale is {scale}"))
        elif self._collapses(scaler):
            self._collapsed = True
            session.see(replace(symptom, place="scaler", detail=f"{self.overflows} steps skipped in a row"))
        elif self._bad_without_scale(scaler, optimizer):
            session.see(symptom)

    def overflows_alone(self, optimizer: Any) -> bool:
        """Whether bad gradients of another optimizer under the same scaler come from the scale: the scaler skips that one by itself."""
        return self.current is None or not self._bad_without_scale(self.current, optimizer)

    def _collapses(self, scaler: Any) -> bool:
        return not self._collapsed and (self.overflows >= FOR_EVER or (self.overflows >= IN_A_ROW and scaler.get_scale() < 1.0))

    def never_stepped(self) -> Symptom | None:
        """At the end: a run in which a scaler skipped every step has not trained."""
        if self._ever or self._collapsed or self.counted < IN_A_ROW:
            return None
        return Symptom("scaler", "inf", "gradient", f"all {self.counted} steps skipped")

    def _bad_without_scale(self, scaler: Any, optimizer: Any, entries: dict[int, Entry] | None = None, step: int | None = None) -> bool:
        scale = scaler._scale
        if scale is None or self.together.flat():
            return False
        program = None
        if entries is not None:
            program = Program(self.session.recorder, needed_for(entries, set(entries)), self.session.leaves())
        with self.together.whole():
            case = gather(self.session, Symptom("gradient", "nan", "gradient"), optimizer, scaler, program, step)
            return self._bad_at_scale_one(scale, case)

    def _bad_at_scale_one(self, scale: torch.Tensor, case: Case) -> bool:
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(scale):  # type: ignore[attr-defined]
            before = scale.clone()
            scale.fill_(1.0)
            try:
                return not finite(case.program) and diagnose(case).cause.code not in OF_THE_SCALE
            finally:
                scale.copy_(before)

    def update(self, call: Callable[..., Any], scaler: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`scaler.update()`: after a step that we dropped the scale stays as it was."""
        states, held = scaler._per_optimizer_states, self._held
        self._held = set()
        if self._put_back and self._before is not None:
            _, scale, tracker = self._before
            scaler._scale.copy_(scale)
            scaler._growth_tracker.copy_(tracker)
        self._put_back = False
        if held and not args and not kwargs:
            found = {key for key, state in states.items() if state["found_inf_per_device"]}
            if found <= held:
                states.clear()
                return None
            for key in found & held:
                for value in states[key]["found_inf_per_device"].values():
                    value.fill_(0.0)
        bad, self.bad_loss = self.bad_loss, None
        if bad is None or args or kwargs:
            return call(scaler, *args, **kwargs)
        before = scaler._scale.clone(), scaler._growth_tracker.clone()
        result = call(scaler)
        for live, old in zip((scaler._scale, scaler._growth_tracker), before, strict=True):
            live.copy_(torch.where(bad, old, live))  # chosen on the device: the host does not know the loss yet
        self._before = (scaler, *before)
        return result

    # -- fused on the device: read late -------------------------------------------------------------------------

    def late(self, step: int, loss: float, entries: dict[int, Entry], optimizer: Any, scaler: Any) -> Symptom | None:
        """The kernel skipped a scaled step: say whether that was a fault, which also leaves the scale as it was before."""
        self.overflows += 1
        self.counted += 1
        if not math.isfinite(loss):
            return late_symptom(loss, math.nan)
        if self._bad_without_scale(scaler, optimizer, entries, step):
            self._put_back = True
            return late_symptom(loss, math.nan)
        if self._collapses(scaler):
            self._collapsed = True
            return Symptom("scaler", "inf", "gradient", f"{self.overflows} steps skipped in a row")
        return None

    def settled(self) -> None:
        """A scaled step was made."""
        self.overflows, self._collapsed, self._ever = 0, False, True


@unseen
class _Resuming:
    """Runs a scaler's step with recording off, and on again for the optimizer's own step inside it."""

    def __init__(self, session: Session, call: Callable[..., Any]) -> None:
        self.recorder, self.call = session.recorder, call

    def __call__(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        original, recorder = optimizer.step, self.recorder

        @functools.wraps(original)
        def step(*inner: Any, **named: Any) -> Any:
            return recorder.resumed(original, *inner, **named)

        optimizer.step = step
        try:
            return self.call(scaler, optimizer, *args, **kwargs)
        finally:
            if "step" in vars(optimizer):
                del optimizer.step
                if getattr(original, "__func__", original) is not getattr(type(optimizer), "step", None):
                    optimizer.step = original
