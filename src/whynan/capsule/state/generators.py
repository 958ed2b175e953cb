"""Random generators of the program's own: a `torch.Generator`, numpy's, Python's, held by modules and files.

A replay that draws from one must draw what the step drew, and must not move it for the program.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from whynan.capsule.sites import is_installed, is_internal

States = list[tuple[Any, Any]]  # each with its state


class Generators:
    """Those that were found so far; they are few, and kept."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def find(self, values: Iterable[Any]) -> None:
        """Take note of the generators among some values; torch's, numpy's and Python's common ones are looked after elsewhere."""
        kinds = _kinds()
        for value in values:
            if issubclass(type(value), kinds) and value is not torch.default_generator and _has_state(value):
                self.known[id(value)] = value

    def find_around(self, root: torch.nn.Module) -> None:
        """Take note of those that a model holds, and that stand in the files its modules are written in."""
        modules = list(root.modules())
        files = {type(m).__module__: getattr(type(m), "forward", None) for m in modules}
        self.find(value for m in modules for value in m.__dict__.values())
        self.find(value for name, forward in files.items() for value in _globals(name, forward))

    def find_in(self, function: Any) -> None:
        """Take note of those that a function names, or has in its closure."""
        named = inspect.getclosurevars(function)
        self.find([*named.nonlocals.values(), *named.globals.values()])

    def take(self) -> States:
        """Return them with their states."""
        return [(held, _state_of(held)) for held in self.known.values()]


def put(states: Iterable[tuple[Any, Any]]) -> None:
    """Put generators back to their states."""
    for held, state in states:
        if isinstance(held, random.Random):
            held.setstate(state)
        elif hasattr(held, "bit_generator"):
            held.bit_generator.state = state
        else:
            held.set_state(state)


def _state_of(held: Any) -> Any:
    if isinstance(held, random.Random):
        return held.getstate()
    return held.bit_generator.state if hasattr(held, "bit_generator") else held.get_state()


def _has_state(held: Any) -> bool:
    """Whether a generator can be put back: one that draws from the system cannot."""
    try:
        _state_of(held)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy.random")
    return (torch.Generator, random.Random, *((numpy.Generator, numpy.RandomState) if numpy is not None else ()))


def _globals(name: str, forward: Any) -> Iterator[Any]:
    code = getattr(forward, "__code__", None)
    if code is not None and not is_internal(code) and not is_installed(code):
        yield from list(getattr(sys.modules.get(name), "__dict__", {}).values())
