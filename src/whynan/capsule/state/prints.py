"""Tell by little whether something was changed: an attribute, a table of them, a weight, a buffer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from whynan.capsule.tape.facts import is_readable, version_of

MAY_HOLD = frozenset({torch.Tensor, list, tuple, dict})
_MOST, _DEEPEST = 256, 4  # members, and levels, of a container in an attribute that is looked through at every call
Print = tuple[int, int, list[float]]
Marks = list[tuple[int, int]]


def mark(value: Any) -> object:
    """Return something by which to tell that an attribute was set or filled anew, without holding a tensor."""
    if isinstance(value, torch.Tensor):
        return id(value), weakref.ref(value)  # another tensor may have the number of one that is gone
    if type(value) in MAY_HOLD and can_be_gone_through(value):
        return tuple(mark(v) for v in (value.values() if type(value) is dict else value)), len(value)
    return id(value)


def can_be_gone_through(value: Any) -> bool:
    """Whether a value can be gone through at every call: not a vocabulary, not a tree that knows its parents."""
    todo, members = [(value, 0)], 0
    while todo:
        item, depth = todo.pop()
        if type(item) in MAY_HOLD and type(item) is not torch.Tensor:
            members += len(item)
            if members > _MOST or depth > _DEEPEST:
                return False
            todo += [(v, depth + 1) for v in (item.values() if type(item) is dict else item)]
    return True


def equal(buffer: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a copy still says what a buffer holds."""
    if buffer.shape != copy.shape:  # resized in place, perhaps from nothing
        return False
    try:
        return torch.equal(buffer, copy) or bool(((buffer == copy) | ((buffer != buffer) & (copy != copy))).all())  # NaN that was there is no change
    except (RuntimeError, NotImplementedError):  # a kind of tensor that cannot be compared
        return True


def differs(now: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether something was put into a table, or taken out of it."""
    return len(now) != len(before) or any(now.get(k) is not v for k, v in before.items())


def print_of(weight: torch.Tensor) -> Print:
    """Return something by which to tell that a weight was written to, also past its version counter: some of its values."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if not is_readable(weight):
            return version_of(weight), 0, []
        return version_of(weight), weight.data_ptr(), weight.detach().reshape(-1)[:4].tolist()


def marks_of_gradients(weights: Iterable[torch.Tensor]) -> Marks:
    """Return by what to tell that gradients were written to or exchanged: versions and places, and none of their numbers."""
    held = [grad for weight in weights if (grad := weight.grad) is not None]
    try:
        return [(grad._version, grad.data_ptr()) for grad in held]
    except (RuntimeError, NotImplementedError):  # sparse, of inference mode
        return [(version_of(grad), id(grad)) for grad in held]
