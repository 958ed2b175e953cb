"""Transforms of functions: `torch.func`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling  # dynamo knows the answers and leaves out what stands behind them

from whynan.capsule.unseen import unseen

if TYPE_CHECKING:
    from whynan.capsule.doors.interception import Interception


@unseen
def watch_transforms(interception: Interception) -> None:
    """Stand at the transforms of functions in `torch.func`."""
    for name in ("vmap", "grad", "grad_and_value", "vjp", "jvp", "jacrev", "jacfwd", "hessian"):
        _transform(interception, torch.func, name)
    _transform(interception, torch, "vmap")


@unseen
def _transform(interception: Interception, owner: Any, name: str) -> None:
    original, recorder = getattr(owner, name), interception.doors.recorder
    immediate = name in ("vjp", "jvp")
    reach = interception.reach

    @functools.wraps(original)
    def transform(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():  # it knows the original
            return original(*args, **kwargs)
        if immediate:
            return recorder.opaque("call", original, original, args, kwargs) if recorder.here else original(*args, **kwargs)
        made = original(*args, **kwargs)
        recipe = _Recipe(original, args, kwargs)
        derives = name != "vmap" or getattr(recipe.function, "_whynan_derives", False)

        @functools.wraps(made)
        def call(*inner: Any, **named: Any) -> Any:
            if is_dynamo_compiling():
                return made(*inner, **named)
            if (recorder := reach.recorder) is None or not recorder.here:
                return made(*inner, **named)
            try:
                if derives:
                    return recorder.suspended(reach.doors.going_back.derived, made, inner, named)
                if recorder.arguments.takes_results(recipe.function):
                    return recorder.opaque("call", recipe.made_anew, lambda _, *inner, **named: made(*inner, **named), (recipe.function, *inner), named)
                return recorder.opaque("call", made, made, inner, named)
            except BaseException:
                reach.leave_out()
                raise

        call._whynan_derives = derives  # type: ignore[attr-defined]
        return call

    interception.replace(owner, name, transform)


class _Recipe:
    """How a function was transformed, to do the same to one made anew; as of `Reach`, nothing of it travels."""

    __slots__ = ("function", "kwargs", "rest", "transform")
    uncarried = "a function that is made anew with results of the step"

    def __init__(self, transform: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        self.function: Any = args[0] if args else None
        self.rest: tuple[Any, ...] = args[1:]
        self.transform, self.kwargs = transform, kwargs

    def made_anew(self, function: Callable[..., Any], *inner: Any, **named: Any) -> Any:
        return self.transform(function, *self.rest, **self.kwargs)(*inner, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, ()
