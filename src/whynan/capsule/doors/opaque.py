"""Calls that a function mode cannot look through, and those that ask for it themselves."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling  # dynamo knows the answers and leaves out what stands behind them

from whynan.capsule.unseen import leave_out, unseen

if TYPE_CHECKING:
    from whynan.capsule.doors.interception import Interception


@unseen
def watch_functions(interception: Interception) -> None:
    """Those functions of torch that are written in Python ask for modes themselves."""
    recorder = interception.doors.recorder
    handled = recorder.short_way(torch.overrides.handle_torch_function)
    for owner in (torch.nn.functional, torch.functional, torch._tensor):
        interception.replace(owner, "handle_torch_function", handled)


@unseen
def watch_own_functions(interception: Interception) -> None:
    """Stand at functions with a backward of their own: they are recorded whole."""
    recorder = interception.doors.recorder
    apply = torch.autograd.Function.__dict__["apply"]  # a Python classmethod up to torch 2.14, then one of C

    @classmethod  # type: ignore[misc]
    def watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = apply.__get__(None, cls)
        if is_compiling():
            return bound(*args, **kwargs)
        try:
            if recorder.here:
                return recorder.opaque("call", bound, bound, args, kwargs)
            return bound(*args, **kwargs)
        except BaseException:
            leave_out()
            raise

    interception.replace(torch.autograd.Function, "apply", watched_apply)


@unseen
def watch_subclasses(interception: Interception) -> None:
    """Stand where a tensor is given another class."""
    recorder = interception.doors.recorder
    as_subclass = torch.Tensor.as_subclass  # which no function mode is asked about

    @functools.wraps(as_subclass)
    def watched_as_subclass(self: torch.Tensor, cls: Any) -> Any:
        if not is_compiling() and recorder.here:
            return recorder.opaque("call", as_subclass, as_subclass, (self, cls), {})
        return as_subclass(self, cls)

    interception.replace(torch.Tensor, "as_subclass", watched_as_subclass)


@unseen
def watch_scripts(interception: Interception) -> None:
    """Stand at functions of TorchScript."""
    recorder = interception.doors.recorder
    script: Any = torch.jit.ScriptFunction.__call__

    def script_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        python = getattr(self, "_torchdynamo_inline", None)  # the function it was made of: a replay sees its lines
        if recorder.replays_here and python is not None:
            return python(*args, **kwargs)
        bound = functools.partial(script, self)
        try:
            if recorder.here:
                return recorder.opaque("call", python or bound, bound, args, kwargs)
            return bound(*args, **kwargs)
        except BaseException:
            leave_out()
            raise

    interception.replace(torch.jit.ScriptFunction, "__call__", script_call)


@unseen
def watch_compiler(interception: Interception) -> None:
    """Stand at functions that are compiled from here on, and at those that are already."""
    original: Any = torch.compile
    interception.compiled.find()

    @functools.wraps(original)
    def watched_compile(model: Any = None, **kwargs: Any) -> Any:
        if model is None:  # used as a decorator with options
            return lambda fn: watched_compile(fn, **kwargs)
        made = original(model, **kwargs)
        interception.compiled.add(made)
        return made

    interception.replace(torch, "compile", watched_compile)
