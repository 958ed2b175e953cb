"""Hand the parts of a checkpoint out: all of them, or none where one does not fit.

What fits by its names and shapes is loaded last and needs no copy of what was there. Of the rest (other names, which a
hook of the program may translate; objects whose `load_state_dict` only they know) a copy is kept until all are loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from whynan.errors import let_through

_FACTORED = ("row_var", "col_var")  # of Adafactor


class Unhealthy(Exception):
    """Why a checkpoint cannot be taken."""


def hand_out(state: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Give each part its state; if one does not take it, all are as before and `Unhealthy` says why.

    >>> model, other = torch.nn.Linear(2, 1), torch.nn.Linear(3, 1)
    >>> hand_out({"model": other.state_dict()}, {"model": model})
    Traceback (most recent call last):
    whynan.recovery.fitting.Unhealthy: 'model' does not fit: weight is [1, 3] in the file and [1, 2] here
    """
    unlike = {name: _misfit(part, state[name]) for name, part in parts.items()}
    before: dict[str, Any] = {}
    for name, part in sorted(parts.items(), key=lambda item: unlike[item[0]] == ""):
        try:
            if unlike[name] != "":
                before[name] = copy.deepcopy(part.state_dict())
            part.load_state_dict(state[name] if isinstance(part, torch.nn.Module) else _own_copy(state[name]))
            if unlike[name] and isinstance(part, torch.optim.Optimizer) and (wrong := _misfit(part, part.state_dict())):
                raise Unhealthy(wrong)  # torch's takes moments of any shape; a hook of the program may have translated them
        except Exception as error:
            let_through(error)
            for changed, held in before.items():
                parts[changed].load_state_dict(held)
            raise Unhealthy(f"{name!r} does not fit: {unlike[name] or _first_line(error)}") from None


def _misfit(part: Any, state: Any) -> str | None:
    """Return why a state is not that of a part, by names and shapes: an empty text where it surely is, None where nobody knows."""
    try:
        if isinstance(part, torch.nn.Module):
            return _other_tensors(part.state_dict(), state)
        return _other_groups(part, state) if isinstance(part, torch.optim.Optimizer) else None
    except Exception as error:
        let_through(error)
        return None


def _other_groups(part: torch.optim.Optimizer, given: Mapping[str, Any]) -> str | None:
    groups = given["param_groups"]
    sizes = [[len(group["params"]) for group in held] for held in (groups, part.param_groups)]
    if sizes[0] != sizes[1]:
        return f"its groups hold {sizes[0]} parameters in the file and {sizes[1]} here"
    if not type(part).__module__.startswith("torch.optim") or isinstance(part, torch.optim.LBFGS):
        return None  # whose state need not be of the shape of its weights
    keys = [key for group in groups for key in group["params"]]
    weights = [weight for group in part.param_groups for weight in group["params"]]
    unlike = (_other_moments(number, weight, given["state"].get(key, {})) for number, (key, weight) in enumerate(zip(keys, weights, strict=True)))
    return next(filter(None, unlike), "")


def _other_moments(number: int, weight: torch.Tensor, moments: Mapping[str, Any]) -> str:
    """Say which moment of a weight is of another one: torch's are numbers, or as large as their weight, or of its rows and columns."""
    for name, held in moments.items():
        if isinstance(held, torch.Tensor) and held.dim() and held.shape != weight.shape and not (name in _FACTORED and _spans(held, weight)):
            return f"{name} of parameter {number} is {list(held.shape)} in the file, and the parameter {list(weight.shape)} here"
    return ""


def _spans(part: torch.Tensor, whole: torch.Tensor) -> bool:
    return part.dim() == whole.dim() and all(size in (1, other) for size, other in zip(part.shape, whole.shape, strict=True))


def _other_tensors(own: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    for name in (*own, *given):
        if name not in given:
            return f"the file has no {name}"
        if name not in own:
            return f"{name} of the file is not there"
        mine, its = own[name], given[name]
        if isinstance(mine, torch.Tensor) and (not isinstance(its, torch.Tensor) or mine.shape != its.shape):
            return f"{name} is {_shape(its)} in the file and {list(mine.shape)} here"
    return ""


def _first_line(error: Exception) -> str:
    """The line that says what was wrong: torch's first one may only announce it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.rstrip().endswith(":")]
    return (lines or [type(error).__name__])[0][:120]


def _shape(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _own_copy(state: Any) -> Any:
    """Copy tensors out of the file: an optimizer keeps those it is given, and the file may go."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return type(state)((k, _own_copy(v)) for k, v in state.items())
    if isinstance(state, list):
        return [_own_copy(v) for v in state]
    if isinstance(state, tuple) and type(state) is tuple:
        return tuple(_own_copy(v) for v in state)
    return state
