"""How the arguments of a call are kept, so that a replay gives it the tensors that it makes itself."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch

from whynan.capsule.made import contents
from whynan.capsule.state.generators import Generators
from whynan.capsule.tape.entries import Inner, Outside, Slot
from whynan.capsule.tape.nested import CONTAINERS, LEAVES, tensors_of
from whynan.capsule.unseen import unseen

if TYPE_CHECKING:
    from whynan.capsule.tape.tape import Tape


Reads = list[Slot | Inner | Outside]
_SHORT = 256  # items of a container that is looked into at every call
_FUNCTIONS = frozenset({FunctionType, MethodType, functools.partial})


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


@unseen
class Arguments:
    """Keeps the arguments of calls for a tape: what other calls have made as references to these, all else as it is."""

    def __init__(self, tape: Tape, generators: Generators) -> None:
        self._tape, self.generators = tape, generators

    def keep(self, value: Any, reads: Reads) -> Any:
        """Return what stands for an argument on the tape; the tensors in it are added to `reads`."""
        if isinstance(value, torch.Tensor):
            kept = self._tape.refer(value)
            reads.append(kept)
            return kept
        if type(value) in _FUNCTIONS and self.takes_results(value):
            return self._keep_function(value, reads)
        if isinstance(value, (LEAVES, torch.nn.Module)) or callable(value):
            return value
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self.keep(v, reads) for v in value])
        if kind is dict:
            return {k: self.keep(v, reads) for k, v in value.items()}
        if kind is torch.Generator:
            self.generators.find([value])
            return value
        return self._keep_object(value, reads)

    def takes_results(self, function: Any) -> bool:
        """Whether a function computes with results of the step that it takes from around it (`vmap(lambda v: grad(loss, …, v))`)."""
        if type(function) is functools.partial:
            return self.takes_results(function.func) or self._hold_results([function.args, function.keywords])
        if type(function) is MethodType:
            owner = function.__self__
            return not isinstance(owner, torch.nn.Module | type) and self._hold_results(list(getattr(owner, "__dict__", {}).values()))
        return type(function) is FunctionType and bool(self._results_around(function))

    def _keep_function(self, function: Any, reads: Reads) -> Any:
        """Keep a function that takes results of the step so that it is made anew with those of a replay."""
        if type(function) is FunctionType:
            return Surrounded(function, {name: self.keep(held, reads) for name, held in self._results_around(function).items()})
        if type(function) is MethodType:
            return Bound(function, {}, {"self": self._keep_object(function.__self__, reads)})
        return Bound(
            function, {}, {"function": self.keep(function.func, reads), "args": self.keep(function.args, reads), "kwargs": self.keep(function.keywords, reads)}
        )

    def _results_around(self, function: FunctionType) -> dict[str, Any]:
        return {name: value for name, value in _around(function).items() if self._are_results(value)}

    def _are_results(self, values: Any) -> bool:
        return any(self._tape.slot_of(tensor) is not None for tensor in tensors_of(values))

    def _hold_results(self, values: list[Any]) -> bool:
        """Whether results of the step are among some values, or in short containers among them: an object may hold a whole data set."""
        short = [v.values() if isinstance(v, dict) else v for v in values if isinstance(v, CONTAINERS) and len(v) <= _SHORT]
        tensors = (t for held in (values, *short) for t in held if isinstance(t, torch.Tensor))
        return any(self._tape.slot_of(tensor) is not None for tensor in tensors)

    def _keep_object(self, value: Any, reads: Reads) -> Any:
        """Keep an object that carries tensors (a batch class, a ModelOutput) so that the made ones are made again."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return Rebuild(value, {}, [self.keep(v, reads) for v in value])
        if isinstance(value, CONTAINERS):
            items = dict(value.items()) if isinstance(value, dict) else dict(enumerate(value))
            kept = {k: self.keep(v, reads) for k, v in items.items()}
            attributes = {k: self.keep(v, reads) for k, v in vars(value).items() if isinstance(v, torch.Tensor)} if hasattr(value, "__dict__") else {}
            return Rebuild(value, attributes, kept)
        attributes = {k: self.keep(v, reads) for k, v in vars(value).items() if isinstance(v, torch.Tensor | dict | list)} if hasattr(value, "__dict__") else {}
        made = any(not isinstance(leaf, Outside) for leaf in attributes.values())
        return Rebuild(value, attributes, None) if made else value


def _around(function: FunctionType) -> dict[str, Any]:
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
