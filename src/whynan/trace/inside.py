"""The values of the module in which a birth happened, by the names that the source gives them."""

from __future__ import annotations

from types import CodeType, FrameType

import torch

from whynan.records import TensorStats
from whynan.tripwire.values import stats

MOST = 12  # values that are listed
SMALL = 64  # elements of a weight that is listed with them


def named_values(frame: FrameType, stop: CodeType) -> list[TensorStats]:
    """Return the tensors among the variables of a module's forward pass, its small weights, and what a helper that it called holds.

    Cost: one pass over each, in a replay only. The functions have returned by then: what they assigned last counts.
    """
    home = _home(frame, stop)
    found = _variables(home) + _weights(home)
    helper = [] if home is frame else _variables(frame, f"{frame.f_code.co_name}: ")
    room = min(len(helper), MOST // 2)
    return found[: MOST - room] + helper[:room]


def _home(frame: FrameType, stop: CodeType) -> FrameType:
    """Return the frame of the module whose code called this function; the function's own where there is none."""
    outer: FrameType | None = frame
    while outer is not None and outer.f_code is not stop:
        if isinstance(_owner(outer)[1], torch.nn.Module):
            return outer
        outer = outer.f_back
    return frame


def _owner(frame: FrameType) -> tuple[str, object]:
    """Return the first argument of a method and its name."""
    first = next(iter(frame.f_code.co_varnames), "")
    return first, frame.f_locals.get(first)


def _variables(frame: FrameType, prefix: str = "") -> list[TensorStats]:
    return [stats(prefix + name, value) for name, value in dict(frame.f_locals).items() if _shown(value)]


def _weights(frame: FrameType) -> list[TensorStats]:
    name, owner = _owner(frame)
    own = owner.named_parameters(recurse=False) if isinstance(owner, torch.nn.Module) else ()
    return [stats(f"{name}.{weight}", value) for weight, value in own if value.numel() <= SMALL]


def _shown(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
