"""Optimizers: where they are made, their steps, the state that they and schedulers load."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling  # dynamo knows the answers and leaves out what stands behind them

from whynan.capsule.doors.compiled import compiler
from whynan.capsule.doors.engine import Doors
from whynan.capsule.stack import ELSEWHERE
from whynan.capsule.unseen import leave_out, unseen

if TYPE_CHECKING:
    from whynan.capsule.doors.interception import Interception


@unseen
def watch_optimizers(interception: Interception) -> None:
    """Stand where optimizers are made, zero gradients and load their state."""
    doors, recorder = interception.doors, interception.doors.recorder
    cls = torch.optim.Optimizer
    patch_step, zero, load = cls._patch_step_function, cls.zero_grad, cls.load_state_dict

    def _patch_step_function(self: torch.optim.Optimizer) -> None:
        patch_step(self)
        watch_step_of(interception, type(self))
        if recorder.mine or doors.may_meet():
            doors.optimizer_made(self)

    @functools.wraps(zero)
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        if is_dynamo_compiling():
            zero(self, *args, **kwargs)
            return
        try:
            result = ELSEWHERE if compiler._is_compiling_flag else recorder.outermost(doors.zeroing.zeroed, zero, self, args, kwargs)
            if result is ELSEWHERE and (not recorder.replays_here or self not in recorder.stepped):
                zero(self, *args, **kwargs)
        except BaseException:
            leave_out()
            raise

    @functools.wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            before = doors.loading.loading(self)
            result = recorder.suspended(load, self, *args, **kwargs)
            doors.loading.loaded(self, before)
            return result
        except BaseException:
            leave_out()
            raise

    interception.replace(cls, "_patch_step_function", _patch_step_function)
    interception.replace(cls, "zero_grad", zero_grad)
    interception.replace(cls, "load_state_dict", load_state_dict)


@unseen
def watch_step_of(interception: Interception, cls: type[torch.optim.Optimizer]) -> None:
    """Wrap the `step` of an optimizer class, once."""
    original, reach = cls.step, interception.reach
    if getattr(original, "_whynan", None) is reach:
        return

    @functools.wraps(original)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or compiler._is_compiling_flag or (recorder := reach.recorder) is None:
            return original(self, *args, **kwargs)
        try:
            if (result := recorder.outermost(reach.doors.step, original, self, args, kwargs)) is not ELSEWHERE:
                return result
            if recorder.replays_here:
                return recorder.left_out(self, args, kwargs)
            if recorder.running and not reach.doors.session.stepping:
                return reach.doors.elsewhere.step(original, self, args, kwargs)
            return original(self, *args, **kwargs)
        except BaseException:
            reach.leave_out()
            raise

    step._whynan = reach  # type: ignore[attr-defined]
    interception.replace(cls, "step", step)


@unseen
def watch_step_on(interception: Interception, optimizer: torch.optim.Optimizer) -> None:
    """Wrap a `step` that hangs on the optimizer itself: a scheduler made before watching began put it there."""
    original, reach = vars(optimizer).get("step"), interception.reach
    if original is None:
        return

    def call(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        if (recorder := reach.recorder) is None:
            return original(*args, **kwargs)
        if is_compiling():
            return original(*args, **kwargs)
        try:
            if recorder.here:
                optimizer._opt_called = True  # type: ignore[attr-defined]  # what the scheduler's wrapper notes, also for a step that is left out
                return recorder.suspended(reach.doors.step, call, optimizer, args, kwargs)
            if recorder.replays_here:
                return recorder.left_out(optimizer, args, kwargs)
            if recorder.running and not reach.doors.session.stepping:
                return reach.doors.elsewhere.step(call, optimizer, args, kwargs)
            return original(*args, **kwargs)
        except BaseException:
            reach.leave_out()
            raise

    interception.replace(optimizer, "step", step)


@unseen
def watch_schedulers(interception: Interception) -> None:
    """A loaded scheduler brings its own base rates; several classes have a loader of their own."""
    base = torch.optim.lr_scheduler.LRScheduler
    for cls in [c for c in vars(torch.optim.lr_scheduler).values() if isinstance(c, type) and issubclass(c, base) and "load_state_dict" in vars(c)]:
        interception.replace(cls, "load_state_dict", _loader(vars(cls)["load_state_dict"], interception.doors))


@unseen
def _loader(original: Callable[..., Any], doors: Doors) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            before = doors.loading.loading(self)
            result = original(self, *args, **kwargs)
            doors.loading.loaded(self, before)
            return result
        except BaseException:
            leave_out()
            raise

    return load_state_dict
