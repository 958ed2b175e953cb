"""How the autograd functions of this package are called, and when they are not needed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

# private in torch, as used by its own Function.apply; without it every call takes the slow way
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_modes_active = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_tracing = getattr(torch._C, "_is_tracing", lambda: True)
_compiling = torch.compiler.is_dynamo_compiling
_PLAIN = (Tensor, torch.nn.Parameter)


def apply(kind: type[Function], *arguments: Any) -> Any:
    """Call an autograd function that has a `setup_context`.

    `Function.apply` inspects the signature of `forward` on every call, which takes ten times as long as a small root; that is
    needed only under torch.func and torch.compile.
    """
    if torch.compiler.is_compiling() or _transforms_active():
        return kind.apply(*arguments)
    return super(Function, kind).apply(*arguments)  # type: ignore[misc]


def finish(fresh: Tensor, operation: str, *arguments: Any) -> Tensor:
    """Apply the last operation of a forward pass to a tensor that nobody else holds: in place, where that is safe.

    Compiled by torch 2.11, an autograd function that returns a tensor it has written in place has the gradient 0.
    """
    in_place = "" if torch.compiler.is_compiling() else "_"
    result: Tensor = getattr(fresh, operation + in_place)(*arguments)
    return result


def as_autocast(x: Tensor) -> Tensor:
    """Return float32 under autocast, as autocast has it for roots, powers and arcs; else the tensor."""
    halved = x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if halved and torch.is_autocast_enabled(x.device.type) else x


def readable(x: Tensor) -> bool:
    """Whether the host may look at the numbers: a plain tensor on the CPU, and nobody who records the operations for other numbers.

    There one reduction is far cheaper than the passes of a guard, and where it finds no edge the plain function is the right one. On a device
    the host would wait; a compiler, a transform, a trace or a dispatch mode would see one of two ways.
    """
    return unwatched(x) and x.is_floating_point() and x.layout is torch.strided and not x.is_nested and x.numel() > 0


def unwatched(x: Tensor) -> bool:
    """Whether a tensor of the CPU is plain and its operations are recorded by nobody."""
    return not (_compiling() or not x.is_cpu or type(x) not in _PLAIN or _transforms_active() or _modes_active() or _tracing())


def all_above(x: Tensor, low: float) -> bool:
    """Whether the numbers may be looked at and each is above `low`; NaN is not."""
    return readable(x) and x.detach().min().item() > low


def all_beyond(x: Tensor, least: float) -> bool:
    """Whether the numbers may be looked at and each is larger than `least`, whatever its sign."""
    if not readable(x):
        return False
    if least:  # as a number of the dtype: 0.001 in float32 is more than 0.001
        least = torch.tensor(least, dtype=x.dtype).item()
    return x.detach().abs().min().item() > least


def all_between(x: Tensor, low: float, high: float) -> bool:
    """Whether the numbers may be looked at and each is above `low` and below `high`."""
    return readable(x) and between(x, low, high)


def between(x: Tensor, low: float = -math.inf, high: float = math.inf) -> bool:
    """Whether each number of a readable tensor is above `low` and below `high`: without limits, whether all are finite."""
    least, largest = x.detach().aminmax()
    return low < least.item() and largest.item() < high
