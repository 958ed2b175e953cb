"""Modules: their calls, the state they load, the layers and buffers they get later on, the hooks on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling, is_dynamo_compiling  # dynamo knows the answers and leaves out what stands behind them

from whynan.capsule.doors.compiled import compiler, skip_frame
from whynan.capsule.recorder import Recorder
from whynan.capsule.stack import ELSEWHERE
from whynan.capsule.unseen import leave_out, stand_for, unseen

if TYPE_CHECKING:
    from whynan.capsule.doors.interception import Interception


@unseen
def watch_modules(interception: Interception) -> None:
    """Stand at module calls: an outermost one is an entry of the tape."""
    recorder = interception.doors.recorder
    original = torch.nn.Module.__call__
    plain = original is torch.nn.Module._wrapped_call_impl  # which does nothing but what is done for it below

    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # dynamo traces through this wrapper: it folds the first test and sees only the original
        if is_dynamo_compiling():
            return original(self, *args, **kwargs)
        call: Callable[..., Any] = self._call_impl if plain and self._compiled_call_impl is None else functools.partial(original, self)
        if recorder.inside:  # every submodule comes this way
            return call(*args, **kwargs)
        try:
            result = ELSEWHERE if compiler._is_compiling_flag else recorder.outermost(recorder.module_called, self, call, args, kwargs)
            return call(*args, **kwargs) if result is ELSEWHERE else result
        except BaseException:
            leave_out()
            raise

    if plain:
        stand_for(__call__, original)
    outputs = recorder.outputs
    if outputs is None:
        interception.replace(torch.nn.Module, "__call__", __call__)
        return

    def heard_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return __call__(self, *args, **kwargs)
        try:
            result = __call__(self, *args, **kwargs)
        except BaseException:
            leave_out()
            raise
        if id(self) in outputs.now:
            outputs.hear(self, result)
        return result

    skip_frame(__call__)
    interception.replace(torch.nn.Module, "__call__", heard_call)


@unseen
def watch_module_state(interception: Interception) -> None:
    """Stand where models zero gradients and load their state."""
    doors, recorder = interception.doors, interception.doors.recorder
    module_zero, module_load = torch.nn.Module.zero_grad, torch.nn.Module.load_state_dict

    @functools.wraps(module_zero)
    def module_zero_grad(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        if is_dynamo_compiling():
            module_zero(self, *args, **kwargs)
            return
        try:
            if not is_compiling() and recorder.here:
                recorder.suspended(doors.zeroing.zeroed, module_zero, self, args, kwargs)
            elif not recorder.replays_here or not recorder.stepped:
                module_zero(self, *args, **kwargs)
        except BaseException:
            leave_out()
            raise

    @functools.wraps(module_load)
    def module_load_state(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            before = doors.loading.loading(self)
            if recorder.here:
                recorder.suspended(recorder.about_to_load, self)
            result = recorder.suspended(module_load, self, *args, **kwargs)
            doors.loading.loaded(self, before)
            return result
        except BaseException:
            leave_out()
            raise

    interception.replace(torch.nn.Module, "zero_grad", module_zero_grad)
    interception.replace(torch.nn.Module, "load_state_dict", module_load_state)


@unseen
def watch_layers(interception: Interception) -> None:
    """Hear of layers and buffers that a model gets after its first call. Cost: nothing while none is made."""
    recorder = interception.doors.recorder

    def layer(parent: torch.nn.Module, name: str, child: object) -> None:
        if not is_dynamo_compiling() and not recorder.replaying:
            recorder.roots.altered(parent)

    def buffer(parent: torch.nn.Module, name: str, value: object) -> None:
        if not is_dynamo_compiling() and not recorder.replaying and name not in parent._buffers:
            recorder.roots.altered(parent)

    interception.registered += [
        torch.nn.modules.module.register_module_module_registration_hook(layer),
        torch.nn.modules.module.register_module_buffer_registration_hook(buffer),
    ]
    for cls in (torch.nn.Sequential, torch.nn.ModuleList):
        interception.replace(cls, "insert", _inserting(cls.insert, recorder))


def _inserting(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return an `insert` of a container, which sets its new member past the hooks of torch."""

    @functools.wraps(original)
    def insert(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            recorder.roots.altered(self)
        return original(self, *args, **kwargs)

    return insert


@unseen
def watch_hooks(interception: Interception) -> None:
    """Stand where hooks are hung on modules."""
    for name in ("register_forward_hook", "register_forward_pre_hook"):
        interception.replace(torch.nn.Module, name, interception.hooks.registrar(getattr(torch.nn.Module, name)))
