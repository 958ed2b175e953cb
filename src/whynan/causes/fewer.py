"""A step without some samples of its batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from whynan.capsule.replay import Program
from whynan.capsule.tape.entries import Outside


@contextlib.contextmanager
def without_rows(program: Program, rows: list[int], size: int, sized: bool = False) -> Iterator[None]:
    """Leave samples out: every outside tensor with that first dimension loses these rows for the time being.

    With `sized` the calls outside modules that were given the size of the batch (`zeros(len(x))`, `view(len(x), -1)`) get the smaller one.
    """
    keep = [i for i in range(size) if i not in set(rows)]
    found = {id(leaf): leaf for entry in program.entries for leaf in entry.reads if isinstance(leaf, Outside)}
    handed = [leaf for leaf in found.values() if not leaf.tensor.requires_grad and id(leaf.tensor) not in program.weights]
    batched = [leaf for leaf in handed if leaf.tensor.dim() and leaf.tensor.shape[0] == size]
    others = _BY_NUMBER | (dict.fromkeys(_SIZED, _fewer) if sized else {})
    changed = [(entry, entry.fn) for entry in program.entries if getattr(entry.fn, "__name__", "") in others]
    before = [(leaf, leaf.saved) for leaf in batched]
    try:
        for leaf in batched:
            leaf.saved = leaf.value()[keep]
        for entry, function in changed:
            entry.fn = functools.partial(others[function.__name__], function, keep, size)
        yield
    finally:
        for leaf, saved in before:
            leaf.saved = saved
        for entry, function in changed:
            entry.fn = function


def _write_kept(write: Any, keep: list[int], size: int, target: torch.Tensor, index: Any, value: Any) -> None:
    """Write to rows by their old numbers: `x[3] = 0` must not hit the row that moved to place 3."""
    if not target.dim() or target.shape[0] != len(keep):
        target[index] = value
        return
    full = target.new_zeros(size, *target.shape[1:])
    full[keep] = target
    full[index] = value
    target.copy_(full[keep])


def _read_kept(read: Any, keep: list[int], size: int, target: torch.Tensor, index: Any) -> Any:
    """Read a row by its old number; a row that was left out is not there."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    if target.dim() and target.shape[0] == len(keep) and isinstance(first, int) and not isinstance(first, bool):
        return target[(keep.index(first % size), *rest)]
    return target[index]


def _fewer(function: Any, keep: list[int], size: int, *args: Any, **kwargs: Any) -> Any:
    """Call a function with the number of the rows that were kept where it was given that of all."""

    def fit(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(fit, value))
        return len(keep) if type(value) is int and value == size else value

    return function(*map(fit, args), **{name: fit(value) for name, value in kwargs.items()})


_BY_NUMBER: dict[str, Callable[..., Any]] = {"__setitem__": _write_kept, "__getitem__": _read_kept}
_SIZED = ("zeros", "ones", "full", "empty", "rand", "randn", "randint", "randperm", "arange", "eye", "new_zeros", "new_ones", "new_full", "new_empty",
          "view", "reshape", "expand", "repeat", "broadcast_to")  # fmt: skip
