"""How the arguments of a call are kept, so that a replay gives it the tensors that it makes itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

import torch

from whynan.capsule.state.surroundings import contents
from whynan.capsule.tape.nested import CONTAINERS


class Rebuild:
    """An argument object with tensors inside, rebuilt on replay as a shallow copy with those tensors replaced."""

    def __init__(self, value: Any, attributes: dict[str, Any], items: Any) -> None:
        self.value, self.attributes, self.items = value, attributes, items

    def build(self, get: Callable[[Any], Any]) -> Any:
        """Make the copy, looking up every kept tensor with `get`."""
        if isinstance(self.value, tuple) and hasattr(self.value, "_fields"):
            return type(self.value)(*[get(v) for v in self.items])
        made = copy.copy(self.value)
        for name, kept in self.attributes.items():
            made.__dict__[name] = get(kept)
        if isinstance(self.items, dict):
            for key, kept in self.items.items():
                try:
                    made[key] = get(kept)
                except TypeError:
                    break  # an immutable container: its tensors are kept as they were
        return made


class Surrounded(Rebuild):
    """A function that takes results of the step from around it, by its closure or as globals: made anew with those of a replay."""

    def __init__(self, function: FunctionType, kept: dict[str, Any]) -> None:
        super().__init__(function, {}, kept)

    def build(self, get: Callable[[Any], Any]) -> Any:
        """Make the function."""
        function, held = self.value, {name: get(kept) for name, kept in self.items.items()}
        cells = tuple(CellType(held[n]) if n in held else c for n, c in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        made = FunctionType(function.__code__, {**function.__globals__, **held}, function.__name__, function.__defaults__, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        return made


class Bound(Rebuild):
    """A method of an object that holds results of the step, or a function that was given some already (`partial`): made anew with those of a replay."""

    def build(self, get: Callable[[Any], Any]) -> Any:
        """Make the method, or the partial function."""
        made = get(self.items)
        if isinstance(self.value, MethodType):
            return MethodType(self.value.__func__, made["self"])
        return functools.partial(made["function"], *made["args"], **made["kwargs"])


def around(function: FunctionType) -> dict[str, Any]:
    """Return what a function takes from around it, by name: tensors, and lists of them."""
    code = function.__code__
    cells = {n: contents(c) for n, c in zip(code.co_freevars, function.__closure__ or (), strict=True)}
    named = {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    return {n: v for n, v in (named | cells).items() if isinstance(v, torch.Tensor | list | tuple)}


def leaves(tree: object) -> Iterator[object]:
    """Yield the leaves of nested tuples, lists and dicts."""
    if isinstance(tree, Rebuild):
        yield from leaves(tree.attributes)
        yield from leaves(tree.items)
    elif type(tree) in CONTAINERS or isinstance(tree, CONTAINERS):
        for item in tree.values() if isinstance(tree, dict) else tree:  # type: ignore[attr-defined]
            yield from leaves(item)
    else:
        yield tree
