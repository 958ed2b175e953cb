"""The engine behind all three ways in: stands at torch's doors, notices, has the step diagnosed, and acts.

whynan run script.py     one Guard around the whole script
whynan.watch(model, …)   one Guard in the user's loop
@guard.step              the same, with the user's step function as the thing to replay
"""

from __future__ import annotations

import atexit
import functools
import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, TypeVar

import torch

from whynan.capsule.intercept import Interception
from whynan.capsule.raised import entry_behind
from whynan.capsule.recorder import Recorder
from whynan.capsule.replay import Program
from whynan.capsule.sites import Site, take_site
from whynan.capsule.snapshot import Snapshot
from whynan.capsule.tape import Entry, Outside, Slot, needed_for, tensors_of
from whynan.diagnosis import Case, diagnose
from whynan.errors import TrainingStopped
from whynan.records import Symptom
from whynan.recovery.policy import Budget, Policy
from whynan.report.journal import Journal
from whynan.tripwire.checks import gradients, may_break, nonfinite, optimizer_state, scalar_damage, total_norm
from whynan.tripwire.late import LateFlag, can_wait, is_bad
from whynan.tripwire.values import Damage, damage_of

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


_signature = functools.cache(inspect.signature)
HOPELESS = ("WN601", "WN602", "WN603", "WN608")  # state is damaged: skipping cannot help


_open_guards: weakref.WeakSet[Guard] = weakref.WeakSet()


def _before_fork() -> None:
    for guard in list(_open_guards):
        guard.journal.flush()


def _in_forked_child() -> None:
    for guard in list(_open_guards):
        guard._leave_to_parent()


os.register_at_fork(before=_before_fork, after_in_child=_in_forked_child)


class _SkipStep(Exception):
    """Raised inside an optimizer's closure to leave the step; never seen by the user."""


@dataclass(slots=True)
class Window:
    """What is known of the optimizer step in progress."""

    losses: list[torch.Tensor] = field(default_factory=list)
    symptom: Symptom | None = None
    entry: int = 0  # the backward entry the symptom was seen at
    norm: torch.Tensor | None = None
    clipped: frozenset[int] = frozenset()
    backwards: int = 0
    scale: float | None = None
    told: bool = False
    scaled: bool = False  # a gradient scaler is at work: its overflows are its own business
    late: bool = False  # its values are read when the next step comes


class Guard:
    """Watches training in this thread until `close`. See `whynan.watch`."""

    def __init__(
        self,
        policy: Policy = Policy.SKIP,
        in_a_row: int = 3,
        in_total: int = 10,
        journal: Journal | None = None,
    ) -> None:
        self.recorder = Recorder()
        self.budget = Budget(policy, in_a_row, in_total)
        self.journal = journal or Journal(None)
        self.step_count = 0
        self.window = Window()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.late: LateFlag | None = None
        self._named: list[tuple[str, torch.nn.Module]] = []
        self._unchecked: list[Any] = []  # state that was made or loaded and not looked at yet
        self._risky: dict[int, bool] = {}
        self._function: Entry | None = None
        self._interception = Interception(self)
        self._overflows = 0
        self._collapsed = False
        self._applied = 0
        self._open = False
        self._window_start = 0
        self._stepped_at: Site | None = None
        self.stopped = ""
        self.stepping = False  # an optimizer's own step is running
        self._in_backward = False
        self._stepped_inside: torch.optim.Optimizer | None = None
        self._told_of_threads = False
        self._made_at: dict[int, Site | None] = {}

    # -- life ---------------------------------------------------------------------------------------------------

    def open(self) -> Guard:
        """Begin to watch."""
        self._interception.install()
        self.recorder.faulty = self._internal_error
        self.recorder.seen_probe = self._probed
        self.recorder.seen_write = self._writing
        self.recorder.start()
        self._open = True
        atexit.register(self.close)
        _open_guards.add(self)
        return self

    def _leave_to_parent(self) -> None:
        """In a forked child: watch nothing, write nothing."""
        if self._open:
            self._open = False
            self.recorder.stop()
            self.journal.abandon()

    def close(self) -> None:
        """End watching: settle what is pending, leave torch as it was, finish the files."""
        if not self._open:
            return
        self._open = False
        _open_guards.discard(self)
        atexit.unregister(self.close)
        try:
            self._settle_late()
            if self.window.symptom is not None and not self.window.told:
                self._report()
        except TrainingStopped:
            pass
        except Exception as error:
            self._internal_error(error)
        self.recorder.stop()
        self._interception.remove()
        try:
            self.journal.close(self.step_count, self.budget)
        except Exception as error:
            self.journal.internal_error(error)

    def __enter__(self) -> Guard:
        return self if self._open else self.open()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self.failed_with(error)
        self.close()

    def attach(self, *objects: Any) -> None:
        """Take models and optimizers that were made before watching began."""
        for item in objects:
            if isinstance(item, torch.optim.Optimizer):
                self._interception.watch_step_of(type(item))
                self._interception.watch_step_on(item)
                self.optimizer_made(item)
            elif isinstance(item, torch.nn.Module):
                self._unchecked.append(item)
                self._wrap_hooks(item)

    def _wrap_hooks(self, model: torch.nn.Module) -> None:
        self._interception.wrap_hooks(model)

    def _internal_error(self, error: BaseException) -> None:
        """Log once, switch the watching off, let the training go on."""
        self.journal.internal_error(error)
        self.recorder.stop()
        self._interception.remove()

    # -- the doors ----------------------------------------------------------------------------------------------

    def optimizer_made(self, optimizer: torch.optim.Optimizer) -> None:
        """A new optimizer: everything recorded so far was setup, not a step."""
        if all(o is not optimizer for o in self.optimizers):
            self.optimizers.append(optimizer)
        self._guarded(lambda: self._note_optimizer(optimizer))

    def _note_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._made_at[id(optimizer)] = take_site(2)
        self._unchecked.append(optimizer)
        self.recorder.tape.clear()

    def loaded(self, owner: Any) -> None:
        """State was loaded: look at it before the next step."""
        self._unchecked.append(owner)

    def zeroed(self, call: Callable[..., Any], owner: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Gradients are dropped; a pending symptom that was never stepped on is told now."""
        self._guarded(lambda: self._note_zero(owner))
        call(owner, *args, **kwargs)

    def _note_zero(self, owner: Any) -> None:
        window = self.window
        if window.symptom is not None and not window.told and window.backwards:
            self._turned_away()
        if self.recorder.tape.entries:
            tensors = owner.parameters() if isinstance(owner, torch.nn.Module) else _parameters(owner)
            entry = self.recorder.note("zero", functools.partial(_drop_gradients, list(tensors)))
            self.recorder.tape.add(entry, None)

    def scaled(self, scaler: Any, loss: Any) -> None:
        """A gradient scaler multiplies the loss: the unscaled one is what counts."""
        self.window.scaled = True
        self.window.scale = scaler.get_scale() if not torch.cuda.is_initialized() else None
        self._guarded(lambda: self._note_losses(loss))

    def backward(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The user goes back from a loss."""
        tensors = args[0] if args else kwargs.get("tensors")
        window = self.window
        try:
            if not self.optimizers and window.backwards:
                self._next_step(applied=True)
                window = self.window
            if window.entry < 0 and not self._same_loss(tensors):
                self._turned_away()
                window = self.window
            entry = self.recorder.note("backward", call, args, kwargs)
            self.recorder.tape.add(entry, None)
            if not window.losses or window.backwards:
                self._note_losses(tensors)
            window.backwards += 1
            self._check_losses(entry)
        except Exception as error:
            self._internal_error(error)
        self._in_backward = True
        try:
            result = self.recorder.suspended(call, *args, **kwargs)
        finally:
            self._in_backward = False
        if not self.optimizers:
            self._guarded(self._manual_check)
        elif self._stepped_inside:
            self._guarded(self._after_hooks)
        return result

    def _after_hooks(self) -> None:
        """Optimizers stepped inside the backward pass: settle that step now."""
        optimizer, self._stepped_inside = self._stepped_inside, None
        if self.window.symptom is not None and not self.window.told:
            self._act(optimizer)
        self._next_step(applied=not self.window.told)

    def step_elsewhere(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """An optimizer steps where nothing is recorded: in a hook of the backward pass, or in another thread."""
        if get_ident() != self.recorder.thread:
            if not self._told_of_threads:
                self._told_of_threads = True
                self.journal.say("whynan: another thread steps an optimizer; only the thread that watching began in is watched")
            return call(optimizer, *args, **kwargs)
        if not self._in_backward:
            return call(optimizer, *args, **kwargs)
        self._stepped_inside = optimizer
        try:
            if self.window.symptom is None:
                bad = nonfinite(self._named_gradients(optimizer))
                if bad:
                    self._see(Symptom("gradient", bad[0][2].kind, bad[0][0], _others(bad)))
        except Exception as error:
            self._internal_error(error)
        if self.window.symptom is not None and self.budget.policy is not Policy.OBSERVE:
            return None
        return call(optimizer, *args, **kwargs)

    def grad(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """`torch.autograd.grad`: recorded as a call; in programs without optimizers its outputs are the gradients."""
        create_graph = kwargs.get("create_graph") or (len(args) > 4 and args[4])
        if self.optimizers or create_graph:
            return self.recorder.opaque("call", call, call, args, kwargs)
        if self.window.backwards:
            self._guarded(lambda: self._next_step(applied=True))
        result = self.recorder.opaque("derivative", call, call, args, kwargs)
        self._guarded(lambda: self._check_derivative(args[0] if args else kwargs.get("outputs"), result))
        return result

    def derived(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A gradient made by `torch.func`: in programs without optimizers it is what the update is made of."""
        if self.optimizers:
            return self.recorder.opaque("call", call, call, args, kwargs)
        if self.window.backwards:
            self._guarded(lambda: self._next_step(applied=True))
        result = self.recorder.opaque("derivative", call, call, args, kwargs)
        self._guarded(lambda: self._check_derivative((), result))
        return result

    def clip(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """The user clips: the norm is there for nothing."""
        parameters = args[0] if args else kwargs.get("parameters")
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters or [])
        rest = args[1:] if args else ()
        named = {k: v for k, v in kwargs.items() if k != "parameters"}
        entry: list[Entry] = []
        names: list[tuple[str, Damage]] = []
        self._guarded(lambda: entry.append(self.recorder.note("clip", functools.partial(call, parameters), rest, named)))
        before = functools.partial(self._named_before_clipping, parameters, names)
        norm = _clip_in_two(call, parameters, rest, named, before)
        self._guarded(lambda: self._note_clip(entry, norm, parameters, names))
        return norm

    def _named_before_clipping(self, parameters: list[torch.Tensor], names: list[tuple[str, Damage]]) -> None:
        """The norm is not finite: name the bad tensors now, clipping is about to spread the damage over all of them."""
        bad = nonfinite((n, p.grad) for n, p in self._names_of(parameters) if p.grad is not None)
        names += [(name, damage) for name, _, damage in bad]

    def _note_clip(self, entry: list[Entry], norm: Any, parameters: list[torch.Tensor], names: list[tuple[str, Damage]]) -> None:
        window = self.window
        if entry:
            self.recorder.tape.add(entry[0], norm)
        if isinstance(norm, torch.Tensor) and (window.norm is None or not window.clipped):
            window.norm = norm.detach()
            window.clipped = frozenset(map(id, parameters))
        if names and window.symptom is None and not window.scaled:
            more = f"{len(names)} tensors" if len(names) > 1 else ""
            self._see(Symptom("gradient", names[0][1].kind, names[0][0], more))

    def step(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """The user updates the weights: the last moment to stop it."""
        self.stepping = True
        try:
            return self._step(call, optimizer, args, kwargs)
        finally:
            self.stepping = False

    def _step(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        closure = args[0] if args else kwargs.get("closure")
        self._stepped_at = take_site(2)
        if closure is not None:
            return self._step_with_closure(call, optimizer, closure, args, kwargs)
        if hasattr(optimizer, "found_inf"):
            return self._step_of_scaler(call, optimizer, args, kwargs)
        if not self._allowed(optimizer):
            return None
        before = self._guarded(lambda: self._before_update(optimizer))
        flag = self.late.flag if self.late is not None and self.budget.policy is not Policy.OBSERVE else None
        if flag is not None and can_wait(optimizer):
            optimizer.found_inf = flag  # type: ignore[attr-defined]
            try:
                result = self.recorder.suspended(call, optimizer, *args, **kwargs)
            finally:
                del optimizer.found_inf  # type: ignore[attr-defined]
        else:
            result = self.recorder.suspended(call, optimizer, *args, **kwargs)
        self._after_update(optimizer, before)
        return result

    def _step_of_scaler(self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """A fused optimizer under a gradient scaler: the gradients are still scaled and the kernel skips by itself."""
        found = optimizer.found_inf  # type: ignore[attr-defined]
        if self.window.symptom is not None and not self.window.told and self._act(optimizer) == "skipped":
            self._next_step(applied=False)
            return None
        result = call(optimizer, *args, **kwargs)
        if found.device.type == "cpu" and float(found) > 0:
            return result  # skipped by the kernel; `scaler_step` counts it
        self._next_step(applied=True)
        return result

    def _step_with_closure(
        self, call: Callable[..., Any], optimizer: torch.optim.Optimizer, closure: Callable[[], Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        recorder = self.recorder
        several = isinstance(optimizer, torch.optim.LBFGS) or may_break(optimizer)
        before = Snapshot(optimizer) if several else None
        last: list[Any] = [None]

        def watched() -> Any:
            last[0] = recorder.resumed(closure)
            if not recorder.resumed(self._allowed, optimizer, True):
                raise _SkipStep
            return last[0]

        rest = args[1:] if args else ()
        named = {k: v for k, v in kwargs.items() if k != "closure"}
        try:
            result = recorder.suspended(call, optimizer, watched, *rest, **named)
        except _SkipStep:
            if before is not None:
                before.restore()
            self._next_step(applied=False)
            return last[0]
        self._after_update(optimizer, before)
        return result

    def scaler_step(self, call: Callable[..., Any], scaler: Any, optimizer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A gradient scaler steps: its own skips are normal life until they do not end."""
        recorder, window = self.recorder, self.window
        count, applied = self.step_count, self._applied
        if window.symptom is None:
            window.norm, window.clipped = None, frozenset(id(p) for p in _parameters(optimizer))
        self._stepped_at = take_site(2)
        result = recorder.suspended(_Resuming(self, call), scaler, optimizer, *args, **kwargs)
        if self._applied > applied:
            self._overflows, self._collapsed = 0, False
            return result
        if self.step_count > count:
            return result
        self._guarded(lambda: self._scaler_skipped(scaler, optimizer))
        return result

    def _scaler_skipped(self, scaler: Any, optimizer: Any) -> None:
        self._overflows += 1
        window = self.window
        collapse = self._overflows >= 4 and not self._collapsed and scaler.get_scale() < 1.0
        if window.symptom is None and (self._overflows == 4 or collapse) and not window.told:
            self._collapsed = self._collapsed or collapse
            bad = nonfinite((n, g) for n, g in self._named_gradients(optimizer))
            if bad and (collapse or self._bad_without_scale(scaler, optimizer)):
                self._see(Symptom("scaler" if collapse else "gradient", bad[0][2].kind, bad[0][0], f"{self._overflows} steps skipped in a row"))
        if window.symptom is not None and not window.told:
            self._act(optimizer, scaler)
        self._next_step(applied=False)

    def _bad_without_scale(self, scaler: Any, optimizer: Any) -> bool:
        """Replay the step with a scale of 1: an overflow goes away or moves, a fault of the program stays a fault."""
        scale = scaler._scale
        if scale is None:
            return False
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(scale):  # type: ignore[attr-defined]
            before = scale.clone()
            scale.fill_(1.0)
            try:
                incident = diagnose(self._case(Symptom("gradient", "nan", "gradient"), optimizer, scaler))
            finally:
                scale.copy_(before)
        return incident.cause.code not in ("WN503", "WN202", "WN203", "WN606", "WN802", "WN901")

    # -- noticing -----------------------------------------------------------------------------------------------

    def _note_losses(self, tensors: Any) -> None:
        self.window.losses += [t.detach() for t in tensors_of(tensors)]

    def _check_losses(self, entry: Entry | None) -> None:
        window = self.window
        fresh = window.losses[-1:] if window.losses else []
        for loss in fresh:
            if loss.device.type != "cpu":
                continue  # looked at on the device, later
            damage = scalar_damage(loss.item()) if loss.numel() == 1 else damage_of(loss)
            if damage and (window.symptom is None or window.entry < 0):
                self._see(Symptom("loss", damage.kind, "loss"), entry)

    def _see(self, symptom: Symptom, entry: Entry | None = None) -> None:
        self.window.symptom = symptom
        self.window.entry = entry.number if entry is not None else 0

    def _probed(self, tensor: torch.Tensor, result: object) -> None:
        """The user looked at a value that requires grad: if it is a bad scalar, it is a loss."""
        window = self.window
        if window.symptom is None and tensor.numel() == 1 and tensor.device.type == "cpu" and self.optimizers:
            damage = damage_of(tensor.detach())
            slot = self.recorder.tape.slot_of(tensor)
            if damage and slot is not None and slot.entry > self._window_start:
                self._see(Symptom("loss", damage.kind, "loss"))
                window.entry = -slot.entry

    def _writing(self, target: torch.Tensor) -> bool:
        """A loose in-place write. In programs without optimizers, after a bad backward, it is the update: leave it out."""
        if self.optimizers or not self.window.told or torch.is_grad_enabled() or self.budget.policy is Policy.OBSERVE:
            return True
        return self.recorder.tape.slot_of(target) is not None

    def _manual_check(self) -> None:
        bad = nonfinite((f"gradient of {_shape(p)}", p.grad) for p in self._leaves() if p.grad is not None)
        if bad and self.window.symptom is None:
            self._see(Symptom("gradient", bad[0][2].kind, bad[0][0]))
        if self.window.symptom is not None and not self.window.told:
            self._act(None)
        self._write_metrics(None)

    def _check_derivative(self, outputs: Any, result: Any) -> None:
        self._note_losses(outputs)
        self.window.backwards += 1
        self._check_losses(next(reversed(self.recorder.tape.entries.values()), None))
        bad = nonfinite(("gradient", t) for t in tensors_of(result))
        if bad and self.window.symptom is None:
            self._see(Symptom("gradient", bad[0][2].kind, "gradient"))
        if self.window.symptom is not None and not self.window.told:
            self._act(None)
        self._write_metrics(None)

    def _allowed(self, optimizer: torch.optim.Optimizer, in_closure: bool = False) -> bool:
        """Look at everything before an update; return whether it may go on."""
        if self.stopped:
            raise TrainingStopped(self.stopped)
        try:
            self._look(optimizer)
            if self.window.symptom is None or self.window.told:
                return not (self.window.told and self.budget.policy is not Policy.OBSERVE)
            taken = self._act(optimizer)
        except TrainingStopped:
            raise
        except Exception as error:
            self._internal_error(error)
            return True
        if taken == "skipped":
            if not in_closure:
                self._next_step(applied=False)
            return False
        return True

    def _look(self, optimizer: torch.optim.Optimizer) -> None:
        window = self.window
        if self._unchecked:
            self._look_at_state()
        if self.window.symptom is None and can_wait(optimizer) and not self._busy_buffers():
            self._look_late(optimizer)
            return
        parameters = _parameters(optimizer)
        if window.symptom is None and any(loss.device.type != "cpu" for loss in window.losses):
            damage = _worst(window.losses)
            if damage:
                self._see(Symptom("loss", damage.kind, "loss"))
        if window.symptom is None:
            covered = window.norm is not None and window.clipped.issuperset(map(id, parameters))
            if not covered:
                window.norm = total_norm(gradients(parameters))
            if window.norm is not None and not math.isfinite(float(window.norm)):
                bad = nonfinite(self._named_gradients(optimizer))
                if bad:
                    self._see(Symptom("gradient", bad[0][2].kind, bad[0][0], _others(bad)))
        if window.symptom is None:
            bad = nonfinite(b for _, state in self.recorder.states.values() for b in state.changed_buffers())
            if bad:
                self._see(Symptom("buffer", bad[0][2].kind, bad[0][0], _others(bad)))

    def _look_late(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the last step's flag and send this one's: the device is not waited for."""
        if self.late is None:
            self.late = LateFlag()
        self.late.flag = None
        self.late.read(self._late_values)
        window = self.window
        if window.norm is None or not window.clipped.issuperset(map(id, _parameters(optimizer))):
            window.norm = total_norm(gradients(_parameters(optimizer)))
        window.late = True
        if window.norm is not None or window.losses:
            self.late.arm(window.losses, window.norm, self.step_count, (dict(self.recorder.tape.entries), optimizer))

    def _late_values(self, step: int, loss: float, norm: float, context: Any) -> None:
        entries, optimizer = context
        lr = optimizer.param_groups[0].get("lr")
        self.journal.metrics(step, loss, norm, float(lr) if lr is not None else None, None)
        if not is_bad(loss, norm):
            self.budget.healthy()
            return
        place, value = ("loss", loss) if not math.isfinite(loss) else ("gradient", norm)
        symptom = Symptom(place, "nan" if math.isnan(value) else "inf", "loss" if place == "loss" else "gradient norm")
        ends = {n for n, e in entries.items() if e.kind in ("backward", "clip", "grad", "zero")}
        program = Program(self.recorder, needed_for(entries, ends), self._leaves())
        incident = diagnose(self._case(symptom, optimizer, None, program, step))
        taken = self.budget.decide(incident.cause.code in HOPELESS)
        self.journal.incident(incident, self.budget.action(taken))
        if taken == "stopped":
            self._stop(f"stopped at step {step}: {incident.cause.title}")

    def _settle_late(self) -> None:
        if self.late is not None:
            self.late.read(self._late_values)

    def _busy_buffers(self) -> bool:
        """Whether forward passes change buffers: those must be put back before the next forward pass, so do not wait."""
        states = [state for _, state in self.recorder.states.values()]
        if self.step_count < 2:
            for state in states:
                state.changed_buffers()
        return any(state.changing for state in states)

    def _look_at_state(self) -> None:
        """Weights and optimizer state that were made or loaded since the last look."""
        todo, self._unchecked = self._unchecked, []
        if self.window.symptom is not None and self.window.symptom.place != "loss":
            return
        trained = {id(p) for o in self.optimizers for p in _parameters(o)}
        for root in self.recorder.roots():
            bad = nonfinite((n, p) for n, p in root.named_parameters() if id(p) in trained)
            if bad:
                self._see(Symptom("parameter", bad[0][2].kind, bad[0][0], _others(bad)))
                return
        for owner in todo:
            if isinstance(owner, torch.optim.Optimizer):
                bad = nonfinite(optimizer_state(owner))
                if bad:
                    self._see(Symptom("optimizer state", bad[0][2].kind, bad[0][0], _others(bad)))
                    return

    # -- acting -------------------------------------------------------------------------------------------------

    def _act(self, optimizer: Any, scaler: Any = None) -> str:
        """Diagnose the window's symptom and do what the policy says."""
        symptom = self.window.symptom
        assert symptom is not None
        self.window.told = True
        case = self._case(symptom, optimizer, scaler)
        incident = diagnose(case)
        taken = self.budget.decide(incident.cause.code in HOPELESS)
        self.journal.incident(incident, self.budget.action(taken))
        self._write_metrics(optimizer)
        if taken == "stopped":
            self._stop(f"stopped at step {self.step_count}: {incident.cause.title}")
        if taken == "skipped":
            for _, state in self.recorder.states.values():
                state.rewind()
        return taken

    def _same_loss(self, tensors: Any) -> bool:
        slots = [self.recorder.tape.slot_of(t) for t in tensors_of(tensors)]
        ends = {s.entry for s in slots if s is not None}
        return any(e.number == -self.window.entry for e in self.recorder.tape.needed_for(ends))

    def _turned_away(self) -> None:
        """The program saw the bad value itself and left the step: tell it, and begin anew."""
        self._report()
        self.step_count += 1
        self.window = Window()
        self._window_start = self.recorder.tape.number()

    def _stop(self, reason: str) -> None:
        """Stop the training, and again at every later step if the program swallows it."""
        self.stopped = reason
        raise TrainingStopped(reason)

    def _report(self) -> None:
        """Diagnose and tell without touching anything: the program has already turned away from this step."""
        symptom = self.window.symptom
        assert symptom is not None
        self.window.told = True
        incident = diagnose(self._case(symptom, None, None))
        self.budget.total += 1
        self.journal.incident(incident, self.budget.action("observed"))

    def failed_with(self, error: BaseException) -> None:
        """The user's program raised: say why if the failing call is one of ours to explain."""
        window = self.window
        if isinstance(error, TrainingStopped | SystemExit | KeyboardInterrupt) or not self._open or not self.recorder.running:
            return
        try:
            if window.symptom is not None and not window.told:
                self._report()
            elif (failed := entry_behind(error, self.recorder)) is not None:
                self.recorder.tape.entries[failed.number] = failed
                self._see(Symptom("exception", type(error).__name__, str(error).splitlines()[0] if str(error) else ""), failed)
                self.window.told = True
                incident = diagnose(self._case(self.window.symptom, None, None))  # type: ignore[arg-type]
                if incident.cause.code != "WN901":
                    self.journal.incident(incident, self.budget.action("observed"))
        except Exception as internal:
            self._internal_error(internal)

    def _case(self, symptom: Symptom, optimizer: Any, scaler: Any, program: Program | None = None, step: int | None = None) -> Case:
        if program is None:
            entries = self._entries_for(symptom)
            program = Program(self.recorder, entries, self._leaves(), self._undo(entries, optimizer))
        return Case(
            step=self.step_count if step is None else step,
            symptom=symptom,
            program=program,
            optimizers=self.optimizers,
            optimizer=optimizer,
            scaler=scaler,
            history=self.journal.history(),
            site=self._stepped_at,
            made_at=self._made_at.get(id(optimizer)),
        )

    def _undo(self, entries: list[Entry], optimizer: Any) -> Callable[[], Snapshot] | None:
        return functools.partial(Snapshot, optimizer) if any(e.kind == "optimizer" for e in entries) else None

    def _entries_for(self, symptom: Symptom) -> list[Entry]:
        tape = self.recorder.tape
        if self._function is not None:
            return [self._function]
        if self.window.entry < 0:
            return tape.needed_for({-self.window.entry})
        if self.window.entry and symptom.place in ("loss", "exception"):
            return tape.needed_for({self.window.entry})
        ends = {e.number for e in tape if e.kind in ("backward", "derivative", "clip", "grad", "zero") or (e.kind == "write" and _on_gradient(tape, e))}
        return tape.needed_for(ends) if ends else list(tape)

    def _before_update(self, optimizer: torch.optim.Optimizer) -> Snapshot | None:
        key = id(optimizer)
        risky = self._risky.get(key)
        if risky is None:
            risky = self._risky[key] = may_break(optimizer)
        return Snapshot(optimizer) if risky else None

    def _after_update(self, optimizer: torch.optim.Optimizer, before: Snapshot | None) -> None:
        taken = ""
        if before is not None:
            try:
                bad = nonfinite(self._names_of(_parameters(optimizer))) or nonfinite(optimizer_state(optimizer))
                if bad:
                    self._see(Symptom("parameter", bad[0][2].kind, bad[0][0], _others(bad)))
                    taken = self._undo_update(optimizer, before)
            except TrainingStopped:
                raise
            except Exception as error:
                self._internal_error(error)
        self._next_step(applied=taken != "skipped")

    def _undo_update(self, optimizer: torch.optim.Optimizer, before: Snapshot) -> str:
        after = Snapshot(optimizer)
        before.restore()
        try:
            taken = self._act_on_update(optimizer)
        except BaseException:
            raise
        if taken != "skipped":
            after.restore()
        return taken

    def _act_on_update(self, optimizer: torch.optim.Optimizer) -> str:
        call = functools.partial(_unwatched_step(optimizer), optimizer)
        entry = self.recorder.note("optimizer", call)
        self._function, outer = entry, self._function
        try:
            return self._act(optimizer)
        finally:
            self._function = outer

    def _next_step(self, applied: bool) -> None:
        self._guarded(lambda: self._begin_step(applied))

    def _begin_step(self, applied: bool) -> None:
        if applied:
            if not self.window.told and not self.window.late:
                self.budget.healthy()
            self._applied += 1
        if not self.window.told and not self.window.late:
            self._write_metrics(self.optimizers[-1] if self.optimizers else None)
        self.step_count += 1
        self.window = Window()
        self.recorder.roll()
        self._window_start = self.recorder.tape.number()

    def _write_metrics(self, optimizer: Any) -> None:
        window = self.window
        loss = _number(window.losses[-1]) if window.losses and window.losses[-1].device.type == "cpu" else None
        norm = float(window.norm) if window.norm is not None and window.norm.device.type == "cpu" else None
        lr = optimizer.param_groups[0].get("lr") if optimizer is not None else None
        self.journal.metrics(self.step_count, loss, norm, float(lr) if lr is not None else None, window.scale)

    # -- names --------------------------------------------------------------------------------------------------

    def _leaves(self) -> list[torch.Tensor]:
        """Everything gradients can end in."""
        found: dict[int, torch.Tensor] = {}
        for optimizer in self.optimizers:
            found.update((id(p), p) for p in _parameters(optimizer))
        for root in self.recorder.roots():
            found.update((id(p), p) for p in root.parameters())
        for entry in self.recorder.tape:
            for leaf in entry.reads:
                if isinstance(leaf, Outside) and leaf.tensor.is_leaf and leaf.tensor.requires_grad:
                    found[id(leaf.tensor)] = leaf.tensor
        return list(found.values())

    def _names_of(self, parameters: list[torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        names = {id(p): n for root in self.recorder.roots() for n, p in root.named_parameters()}
        for number, parameter in enumerate(parameters):
            yield names.get(id(parameter), f"parameter {number} {_shape(parameter)}"), parameter

    def _named_gradients(self, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
        for name, parameter in self._names_of(_parameters(optimizer)):
            if parameter.grad is not None:
                yield name, parameter.grad

    def _guarded(self, action: Callable[[], T]) -> T | None:
        """Do something of ours; a failure is logged once and switches the watching off."""
        try:
            return action()
        except TrainingStopped:
            raise
        except Exception as error:
            self._internal_error(error)
            return None

    # -- the third way in ---------------------------------------------------------------------------------------

    def step_function(self, function: F) -> F:
        """See `step`, which is this under its public name on the object `watch` returns."""

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not self.recorder.here:
                return function(*args, **kwargs)
            self._function = self.recorder.note("function", function, args, kwargs)
            try:
                return function(*args, **kwargs)
            finally:
                self._function = None

        return watched  # type: ignore[return-value]


class _Resuming:
    """Runs a scaler's step with recording off, and on again for the optimizer's own step inside it."""

    def __init__(self, guard: Guard, call: Callable[..., Any]) -> None:
        self.guard, self.call = guard, call

    def __call__(self, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        original = optimizer.step
        recorder = self.guard.recorder

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


def _clip_in_two(call: Callable[..., Any], parameters: list[torch.Tensor], rest: Any, named: dict[str, Any], before: Callable[[], None]) -> Any:
    """Clip, with a look between norm and scaling where the norm is on the CPU and not finite."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads or any(g.device.type != "cpu" for g in grads):
        return call(parameters, *rest, **named)
    try:
        bound = _signature(call).bind(parameters, *rest, **named)
    except TypeError:
        return call(parameters, *rest, **named)
    bound.apply_defaults()
    options = bound.arguments
    norm = torch.nn.utils.get_total_norm(grads, options["norm_type"], options["error_if_nonfinite"], options["foreach"])
    if not math.isfinite(float(norm)):
        before()
    torch.nn.utils.clip_grads_with_norm_(parameters, options["max_norm"], norm, options["foreach"])
    return norm


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _drop_gradients(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.grad = None


def _unwatched_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    step = type(optimizer).step
    while hasattr(step, "_whynan"):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def _on_gradient(tape: Any, entry: Entry) -> bool:
    target = entry.args[0] if entry.args else None
    if not isinstance(target, Slot):
        return False
    made = tape.entries.get(target.entry)
    return made is not None and (made.kind == "grad" or (made.kind in ("write", "call") and _on_gradient(tape, made)))


def _worst(tensors: list[torch.Tensor]) -> Damage:
    found = Damage()
    for tensor in tensors:
        found = found | damage_of(tensor)
    return found


def _number(loss: torch.Tensor) -> float:
    return float(loss.item()) if loss.numel() == 1 and not loss.is_complex() else float(loss.abs().float().sum())


def _others(bad: list[tuple[str, torch.Tensor, Damage]]) -> str:
    return f"{len(bad)} tensors" if len(bad) > 1 else ""


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))
