"""A function that goes on along its tangent where its slope would grow beyond a limit."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from whynan.stable.applying import all_between


def with_tangent(function: Callable[[Tensor], Tensor], x: Tensor, low: float, high: float, slope: float) -> Tensor:
    """Return the function between two points, and beyond them the straight line of that slope."""
    limits = torch.finfo(x.dtype)
    if 0 < low < limits.tiny or abs(slope) > limits.max:
        raise ValueError(f"max_slope {abs(slope):g} is beyond {str(x.dtype).removeprefix('torch.')}: there the slope would be infinite again")
    if all_between(x, low, high):
        return function(x)
    inside = torch.where(x < low, low, torch.where(x > high, high, x))  # what clamp's slope is at its limits depends on the version of torch
    # x - inside would be inf - inf; at the limit the first passes the gradient on and relu does not: there the slope counts once
    beyond = -(low - x).relu() if high == math.inf else x - inside
    return function(inside) + slope * beyond


def positive(max_slope: float) -> float:
    """Return the slope, or refuse it."""
    if not max_slope > 0:
        raise ValueError(f"max_slope must be positive, got {max_slope}")
    return max_slope
