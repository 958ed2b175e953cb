"""Updates: everything is looked at before one is made, and followed up after it.

step ──► look at what the step made ──► agree with partners and other ranks ──► let it, or leave it out ──► finish
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch

from whynan.capsule.doors.collectives import several
from whynan.capsule.snapshot import Snapshot
from whynan.capsule.unseen import unseen
from whynan.causes import catalogue
from whynan.engine.acting import Acting
from whynan.engine.foreseeing import Foreseeing
from whynan.engine.noticing import Noticing
from whynan.engine.options import Options
from whynan.engine.partial import TAKEN
from whynan.engine.recovering import Recovering
from whynan.engine.regular import Regular
from whynan.engine.scaling import Scaling
from whynan.engine.session import Session, rate_of, symptom_of
from whynan.engine.sharing import Sharing
from whynan.engine.together import Together
from whynan.engine.undoing import make_update
from whynan.engine.waiting import Waiting
from whynan.errors import TrainingStopped
from whynan.recovery.followers import Followers
from whynan.recovery.place import rank_here
from whynan.tripwire.checks import fits_beside, may_break
from whynan.tripwire.headroom import EVERY

HUGE = 1e18  # a gradient norm whose square is near the end of float32


def get_ready() -> None:
    """Load what a diagnosis needs while the device is busy with the first steps: it takes as long as some steps of a GPU."""
    import rich.console  # noqa: F401 (the terminal's)

    catalogue.rules()


class _SkipStep(Exception):
    """Raised inside an optimizer's closure to leave the step; never seen by the user."""


@unseen
class Stepping:
    """What happens when an optimizer of torch's makes an update."""

    scaling: Scaling  # given by the guard when they are made: they end steps too
    waiting: Waiting

    def __init__(
        self,
        session: Session,
        options: Options,
        noticing: Noticing,
        acting: Acting,
        together: Together,
        sharing: Sharing,
        followers: Followers,
        recovering: Recovering,
        regular: Regular,
        foreseeing: Foreseeing,
    ) -> None:
        self.session, self.options, self.recorder, self.journal = session, options, session.recorder, session.journal
        self.noticing, self.acting, self.together, self.sharing = noticing, acting, together, sharing
        self.followers, self.recovering, self.regular, self.foreseeing = followers, recovering, regular, foreseeing
        self._risky: dict[int, bool] = {}
        self._writes: dict[int, bool] = {}  # whether an optimizer writes to its gradients, once that is known
        self._cramped: set[int] = set()  # optimizers whose state does not fit in memory twice

    def met(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was made: what was known of its number was another's."""
        self._risky.pop(id(optimizer), None)
        self._writes.pop(id(optimizer), None)
        self.foreseeing.met()

    def step(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """The last moment to stop an update."""
        if (args or kwargs) and callable(args[0] if args else kwargs.get("closure")):
            return self._step_with_closure(call, optimizer, args, kwargs)
        if "found_inf" in optimizer.__dict__:
            return self._step_of_scaler(call, optimizer, args, kwargs)
        if optimizer.param_groups[0].get("fused") and self.session.guarded(lambda: self.waiting.may_wait(optimizer)):
            return self.waiting.step(call, optimizer, args, kwargs)
        if not self.allowed(optimizer):
            return None
        risky = self._is_risky(optimizer) or _has_odd_rate(optimizer) or _is_huge(self.session.window.norm) or _is_huge(self.session.window.widest)
        before = self.session.guarded(lambda: self._snapshot(optimizer)) if risky else None
        if self.options.clip_after_rollback is not None:
            self.session.guarded(lambda: self.recovering.clip(optimizer))
        if before is None:
            result = call(optimizer, *args, **kwargs)
            self.finish(optimizer, True)
        else:
            result = make_update(self.session, functools.partial(call, optimizer, *args, **kwargs), before)
            self._after_update(optimizer, before)
        return result

    def allowed(self, optimizer: torch.optim.Optimizer, in_closure: bool = False, before: Snapshot | None = None) -> bool:
        """Look at everything before an update; return whether it may go on. `before` is what a step with a closure began with."""
        session = self.session
        if session.stopped:
            session.stop_again()
        try:
            window = session.window
            if (self.acting.leaving.zeroed_away and self.acting.leaving.steps_on()) or self._left_out(optimizer):
                if not in_closure:
                    self.finish(optimizer, False)
                return False
            self.noticing.look(optimizer)
            if window.symptom is None and session.has_several:
                self._look_at_partners(optimizer)
            if window.several and self.together.begin(optimizer, lambda: not isfinite(self._norm(optimizer) or 0.0)):
                self.together.agree(self._norm(optimizer))
            if window.alone and not window.apart:
                self.acting.telling.report()
                return True
            if window.symptom is None and window.evaluations > 1:
                return True  # a trial point of a line search: its size says nothing of the run
            if window.symptom is None:
                taken = self.foreseeing.before_update(optimizer)
                return in_closure or not self.foreseeing.acts or not self._spike(optimizer, taken)
            if window.told:
                if not in_closure and not session.budget.observes:  # told before its optimizer was made: that bad step ends here
                    self.finish(optimizer, False)
                return session.budget.observes
            if before is not None and self._broke_midway(optimizer, before):
                return session.budget.observes  # told when the update has ended: it holds on to the state that is put back for the replay
            self.foreseeing.settle()
            taken = self.acting.act(optimizer)
        except TrainingStopped:
            raise
        except Exception as error:
            return self._failed(error)
        allowed = taken in ("observed", TAKEN)
        if not allowed and not in_closure:
            self.finish(optimizer, False)
        return allowed

    def _norm(self, optimizer: torch.optim.Optimizer) -> float | None:
        norm = self.noticing.norm_of(optimizer)
        return None if norm is None else float(norm)

    def _failed(self, error: Exception) -> bool:
        """Something of ours failed; return whether the update is made: not one that is known to be bad, where no other rank makes it."""
        session, window = self.session, self.session.window
        settled = not window.several or window.agreed  # else the other ranks go on
        bad = window.symptom is not None and settled and not (window.alone or session.budget.observes)
        session.broken(error)
        if bad:
            self.acting.dropping.drop()
        return not bad

    def _left_out(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this step falls away without a new incident: with a partner's, met again after a rollback, all its micro-batches dropped."""
        window = self.session.window
        if self.sharing.drops(optimizer) or self.acting.dropping.drops_again():
            return True
        if window.dropped and not window.backwards:
            self.acting.dropping.drop()
            return True
        return False

    def _look_beside_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        for look in (self.noticing.look_at_state, self.noticing.look_at_buffers, functools.partial(self._look_at_partners, optimizer)):
            if self.session.window.symptom is None:
                look()

    def _look_at_partners(self, optimizer: torch.optim.Optimizer) -> None:
        symptom = self.sharing.symptom(optimizer)
        if symptom is not None and not (self.session.window.scaled and self.scaling.overflows_alone(optimizer)):
            self.session.see(symptom)

    def _same_for_all(self, taken: str) -> str:
        if taken and rank_here():  # of other ranks the first would not know
            self.journal.say(f"whynan: rank {rank_here()} saw a spike at step {self.session.step_count}; details in its warnings.jsonl", always=True)
        return self.together.strongest(taken)

    def _spike(self, optimizer: torch.optim.Optimizer, taken: str) -> bool:
        """Do what was asked for about a spike; return whether this update is left out."""
        taken = self._same_for_all(taken)
        if taken == "stopped":
            self.session.stop(f"stopped at step {self.session.step_count}: a spike of the loss or the gradient norm")
        if taken == "rolled back" and self.recovering.possible:
            self.recovering.roll_back()
            self.session.window.taken = taken
        elif taken == "skipped":
            self.acting.dropping.drop()
        else:
            return False
        self.journal.say(f"whynan: step {self.session.step_count} {taken}: a spike of the loss or the gradient norm")
        self.finish(optimizer, False)
        return True

    def _is_risky(self, optimizer: torch.optim.Optimizer) -> bool:
        risky = self._risky.get(id(optimizer))
        if risky is None:
            risky = self._risky[id(optimizer)] = self.session.guarded(lambda: may_break(optimizer)) or False
        return risky

    def _snapshot(self, optimizer: torch.optim.Optimizer) -> Snapshot | None:
        """Copy weights and state before an update that may break them, where there is room for it."""
        if fits_beside(optimizer):
            return Snapshot(optimizer, gradients=self._writes.get(id(optimizer), True))
        if id(optimizer) not in self._cramped:
            self._cramped.add(id(optimizer))
            self.journal.say("whynan: too little GPU memory for a copy of weights and state: an update that breaks them cannot be taken back")
        return None

    def _after_update(self, optimizer: torch.optim.Optimizer, before: Snapshot | None) -> None:
        taken = self.session.guarded(lambda: self._check_update(optimizer, before)) if before is not None else ""
        self.finish(optimizer, taken in (None, "", "observed"))

    def _check_update(self, optimizer: torch.optim.Optimizer, before: Snapshot) -> str:
        self._writes[id(optimizer)] = self._writes.get(id(optimizer), False) or before.wrote_gradients
        if self.session.window.told and not before.broke:
            return ""  # observed: that this step is bad was said, and its update is the program's wish
        bad = self.noticing.meant.broken(optimizer, before)
        if bad:
            self.session.see(symptom_of("parameter", bad))
        if not (self.together.any(bool(bad), "parameter") if self.together.differ() else bad):
            return ""
        return self.acting.undo_update(optimizer, before)

    def _step_with_closure(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        closure = args[0] if args else kwargs["closure"]
        several = isinstance(optimizer, torch.optim.LBFGS) or self._is_risky(optimizer)
        before = self.session.guarded(lambda: self._snapshot(optimizer)) if several else None
        last: list[Any] = [None]
        if several and not self._state_allows(optimizer):
            return None
        if self.session.window.backwards and not _evaluates_first(optimizer) and not self._passes_allow(optimizer, closure, last):
            return last[0]
        if before is not None:
            self.session.guarded(before.evaluated)

        def watched() -> Any:
            last[0] = recorder.resumed(closure)
            self.session.window.inside = True
            self.session.window.evaluations += 1
            if not self.allowed(optimizer, True, before):
                raise _SkipStep
            self.session.guarded(lambda: self._remember_evaluation(optimizer))
            if before is not None:
                self.session.guarded(lambda: before.evaluated(last[0]))
            return last[0]

        rest = args[1:] if args else ()
        named = {k: v for k, v in kwargs.items() if k != "closure"}
        try:
            result = call(optimizer, watched, *rest, **named)
        except _SkipStep:
            if before is not None and before.broke:
                self._after_update(optimizer, before)
                return last[0]
            if before is not None and self.session.window.taken != "rolled back":
                before.restore()
            self.finish(optimizer, False)
            return last[0]
        except TrainingStopped:
            if before is not None:
                before.restore()
            raise
        self._after_update(optimizer, before)
        return result

    def _broke_midway(self, optimizer: torch.optim.Optimizer, before: Snapshot) -> bool:
        """Whether an update broke weights before an evaluation of its closure: that one is bad for no reason of its own."""
        if self.noticing.meant.broken_weights(optimizer, before):
            before.given.append(None)
            self.session.window.told = True  # of what the step does from here on nothing else is told
        return before.broke

    def _remember_evaluation(self, optimizer: torch.optim.Optimizer) -> None:
        """A closure is evaluated several times in a step: values can grow until they leave the range inside one."""
        window = self.session.window
        norm = float(window.norm) if isinstance(window.norm, torch.Tensor) and window.norm.is_cpu else window.norm
        known = norm if isinstance(norm, float) else None
        self.session.journal.evaluated(self.session.step_count, window.loss, known, rate_of(optimizer))

    def _state_allows(self, optimizer: torch.optim.Optimizer) -> bool:
        """Look at state that is copied anyway: in the midst of several evaluations its damage looks like that of a weight."""
        bad = self.session.guarded(lambda: self.noticing.meant.bad_state(optimizer))
        if not bad:
            return True
        self.session.see(symptom_of("optimizer state", bad))
        return self.allowed(optimizer)

    def _passes_allow(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], last: list[Any]) -> bool:
        """Look at backward passes made before a step with a closure: such an optimizer (SAM) moves the weights by them first.

        The closure of a step that is left out runs all the same, and is undone with it: a framework waits for its result.
        """
        window = self.session.window
        self.session.guarded(lambda: self.noticing.look(optimizer))
        if window.symptom is None:
            return True
        if not (self.session.budget.observes or window.several or window.told):
            window.inside = True
            last[0] = self.recorder.resumed(closure)
        return self.allowed(optimizer)

    def _step_of_scaler(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """A fused optimizer under a gradient scaler: the gradients are still scaled and the kernel skips by itself."""
        session = self.session
        self.session.stop_again()
        found = optimizer.found_inf  # type: ignore[attr-defined]
        if several():
            return self._step_of_scaler_together(call, optimizer, args, kwargs)
        if found.device.type != "cpu" and self.waiting.nobody_else(optimizer):
            return self.waiting.step(call, optimizer, args, kwargs, found)
        if session.guarded(lambda: self._left_out(optimizer)):
            self.finish(optimizer, False)
            return None
        if session.guarded(lambda: self._drops_scaled(optimizer, bool(found))):
            self.finish(optimizer, False)  # not even by the kernel: it would make state for a first step that never was
            return None
        result = call(optimizer, *args, **kwargs)
        if float(found) == 0:  # else skipped by the kernel: the scaler's door counts it
            self.finish(optimizer, True)
        return result

    def _drops_scaled(self, optimizer: torch.optim.Optimizer, found: bool) -> bool:
        """Whether a step under a scaler is left out; `found` is the scaler's answer about the gradients."""
        window = self.session.window
        self._look_beside_gradients(optimizer)
        if found:
            return self.scaling.blames(optimizer)
        if window.symptom is None or window.told:
            return False
        return self.acting.act(optimizer) != "observed"

    def _step_of_scaler_together(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """The same on many ranks: a skip of the kernel is one on all of them, and the scaler's door settles it with them."""
        found = float(optimizer.found_inf)  # type: ignore[attr-defined]
        if not found and self.session.window.symptom is not None:
            self.session.guarded(self.acting.telling.report)
        elif not found and self.session.guarded(lambda: self._others_skip(optimizer)):
            self.finish(optimizer, False)
            return None
        result = call(optimizer, *args, **kwargs)
        if not found:
            self.finish(optimizer, True)
        return result

    def _others_skip(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a scaled step is left out because of another rank, where their gradients can differ."""
        if not self.together.begin(optimizer, lambda: False) or not self.together.uneven:
            return False
        self.together.agree(0.0)
        return self.session.window.symptom is not None and self.acting.act(optimizer, self.scaling.current) != "observed"

    def finish(self, optimizer: Any, applied: bool) -> None:
        """The step is over: made, or left out."""
        session = self.session
        try:
            window = session.window
            if not window.told and not window.late:
                if applied and session.budget.streak:
                    session.budget.healthy()
                if optimizer is not None:  # else written when the gradients were made
                    session.write_metrics(optimizer)
            if optimizer is not None:
                session.trainings.stepped(session.step_count, optimizer)
            session.applied += applied
            dropped = not applied and window.taken not in ("", "observed")  # a scaler's own skip is not ours to follow up
            if applied or dropped:
                self.followers.stepped(optimizer, applied)
            if dropped:
                self.acting.dropping.dropped(optimizer)
            if optimizer is not None and (session.has_several or dropped):
                self.sharing.finished(optimizer, window.taken if dropped else "")
            if self.recovering.last is not None:
                self.recovering.finished(applied, window.scaled and not dropped, window.taken == "rolled back")
            if applied and self.regular.wanted:
                self.regular.finished()
            if self.foreseeing.follows or session.step_count % EVERY == 0:
                self.foreseeing.state()
            if session.tally.counts:
                session.tally.look()
            session.next_step(optimizer is None and not session.recorder.roots.between)
            if session.step_count == 2 and torch.cuda.is_initialized():
                get_ready()
        except TrainingStopped:
            raise
        except Exception as error:
            session.broken(error)


def _evaluates_first(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer evaluates its closure before it does anything else, as all of torch's do."""
    return type(optimizer).__module__.startswith("torch.optim")


def _is_huge(norm: object) -> bool:
    """Whether the squares of some gradients may be past the range of float32: moments are made of them, and weights with an infinite one stand still."""
    return type(norm) is float and norm > HUGE


def _has_odd_rate(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a learning rate is not a finite number, of Python's or of numpy's; one on a device is not waited for."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if (isinstance(rate, float) or (isinstance(rate, torch.Tensor) and rate.is_cpu and rate.numel() == 1)) and not isfinite(rate):
            return True
    return False
