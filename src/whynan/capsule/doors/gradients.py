"""Gradients: backward passes, gradients that are asked for, clipping."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling  # dynamo knows the answers and leaves out what stands behind them

from whynan.capsule.doors.compiled import compiler
from whynan.capsule.recorder import Recorder
from whynan.capsule.stack import ELSEWHERE, modes
from whynan.capsule.unseen import leave_out, stand_for, unseen

if TYPE_CHECKING:
    from whynan.capsule.doors.interception import Interception

_BACKWARD_NAMES = {"gradient": "grad_tensors"}  # what `Tensor.backward` calls otherwise than `torch.autograd.backward`


@unseen
def watch_backward(interception: Interception) -> None:
    """Stand at backward passes, by whichever name the program calls them."""
    doors, recorder = interception.doors, interception.doors.recorder
    backward, tensor_backward = torch.autograd.backward, torch.Tensor.backward

    @functools.wraps(backward)
    def watched_backward(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or compiler._is_compiling_flag:
            return backward(*args, **kwargs)
        try:
            if (result := recorder.outermost(doors.going_back.backward, backward, args, kwargs)) is not ELSEWHERE:
                return result
            if recorder.replays_here and recorder.replayed is not None:
                recorder.replayed(args[0] if args else kwargs["tensors"])
            elif recorder.inside:
                recorder.goes_back()
            return backward(*args, **kwargs)
        except BaseException:
            leave_out()
            raise

    def through(self: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> Any:
        return recorder.outermost(doors.going_back.backward, backward, (self, *args), kwargs)

    stand_for(through, tensor_backward)

    @functools.wraps(tensor_backward)
    def watched_tensor_backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # the same as the mode would come to, without its detour; a mode of the user's wants to see every call
        if is_dynamo_compiling() or compiler._is_compiling_flag or len(args) > 3 or type(self) is not torch.Tensor or modes() != 1:
            return tensor_backward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        renamed = {_BACKWARD_NAMES.get(name, name): value for name, value in kwargs.items()} if kwargs else kwargs
        try:
            result = through(self, args, renamed)
            return tensor_backward(self, *args, **kwargs) if result is ELSEWHERE else result  # type: ignore[no-untyped-call]
        except BaseException:
            leave_out()
            raise

    interception.replace(torch.Tensor, "backward", watched_tensor_backward)
    interception.replace(torch.autograd, "backward", watched_backward)


@unseen
def watch_gradients(interception: Interception) -> None:
    """Stand where gradients are asked for and where they are clipped."""
    doors, recorder = interception.doors, interception.doors.recorder
    grad, clip = torch.autograd.grad, torch.nn.utils.clip_grad_norm_
    interception.replace(torch.autograd, "grad", _asking(recorder, grad, doors.going_back.grad))
    watched_clip = _asking(recorder, clip, doors.clipping.clip)
    interception.replace(torch.nn.utils, "clip_grad_norm_", watched_clip)
    interception.replace(torch.nn.utils.clip_grad, "clip_grad_norm_", watched_clip)


@unseen
def _asking(recorder: Recorder, original: Callable[..., Any], door: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wrapper that leaves the call to the engine where it is recorded."""

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or compiler._is_compiling_flag:
            return original(*args, **kwargs)
        try:
            result = recorder.outermost(door, original, args, kwargs)
            return original(*args, **kwargs) if result is ELSEWHERE else result
        except BaseException:
            leave_out()
            raise

    return watched
