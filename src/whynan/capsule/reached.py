"""The models that a call runs which is recorded whole: a compiled function, a checkpointed one, an `autograd.Function`.

No door hears of them inside it. They are found by what code names: its arguments, its closure, its globals, and the
attributes of objects among these. None of it is run for that, no property and no `__getattr__`: an object is asked for
nothing, its class and the tables of both are read.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from whynan.capsule.imports import is_library
from whynan.capsule.made import attributes_of, codes_in, contents, home_of, of_class
from whynan.capsule.sites import is_internal
from whynan.errors import let_through

_DEEPEST = 8  # from one thing to the next
_MOST = 256  # things that are looked at in one call
_MEMBERS = 64  # of a container
_CODES = 4096  # whose names are remembered
_NOTHING = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, bytes, type(None), torch.dtype, torch.device, BuiltinFunctionType, torch.Size})
_OF_FUNCTIONS = ("_torchdynamo_orig_callable", "__wrapped__")
_SEQUENCES, _TABLES = frozenset({list, tuple}), frozenset({dict, OrderedDict})
_Module, _Function = torch.nn.Module, torch.autograd.Function

Names = tuple[str, ...]
Found = tuple[Any, Names]  # a value, and the names that the code around it knows
_Seen = dict[tuple[int, int], Found]  # by the numbers of both, which are held: another would get the number of one that is gone
_named: dict[int, tuple[CodeType, Names]] = {}  # by the number of a code object: to hash one is to hash all its constants


def modules_of(fn: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.nn.Module]:
    """Return the modules that a call may run, outermost ones as they are named; none where an object refuses to be looked at.

    Cost: 2 µs for a function of torch that is given tensors, 5 to 10 µs for an `autograd.Function` of the program's, 15 to 30 µs for what names many things.
    """
    try:
        return _modules_of(fn, args, kwargs)
    except Exception as error:  # a class that cannot be compared or hashed: that a model is not found must not end the watching
        let_through(error)
        return []


def _modules_of(fn: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.nn.Module]:
    found: dict[int, torch.nn.Module] = {}
    seen: _Seen = {}
    given = [v for v in (*args, *kwargs.values()) if type(v) not in _NOTHING]
    _follow([fn, *filter(callable, given)], (), found, seen)
    if data := [v for v in given if not callable(v)]:  # what is run knows names of what it is given
        names = tuple(dict.fromkeys(name for value, _ in seen.values() if type(value) is FunctionType for name in _names(value)))
        _follow(data, names, found, seen)
    return list(found.values())


def _follow(values: list[Any], names: Names, found: dict[int, torch.nn.Module], seen: _Seen) -> None:
    todo: list[tuple[Any, Names, int]] = [(v, names, 0) for v in values]
    for value, names, depth in todo:  # grows by what is found
        key = id(value), id(names)
        if key in seen or len(seen) >= _MOST:
            continue
        seen[key] = value, names
        if issubclass(type(value), _Module):
            found[id(value)] = value
        elif depth < _DEEPEST:
            for v, known in _behind(value, names):
                if type(v) not in _NOTHING:
                    todo.append((v, known, depth + 1))


def _behind(value: Any, names: Names) -> Iterable[Found]:
    """Return what a value leads to."""
    kind = type(value)
    if kind is FunctionType:
        return _around(value)
    if kind is MethodType:
        return (value.__func__, ()), (value.__self__, _names(value.__func__))
    if issubclass(kind, type):
        is_run = ("forward", "backward") if issubclass(value, _Function) and not is_library(home_of(value)) else ()
        return [(_function_of(of_class(value, name)), ()) for name in is_run]
    if kind is functools.partial:
        return [(v, ()) for v in (value.func, *value.args, *value.keywords.values())]
    if kind in _SEQUENCES or kind in _TABLES:
        return [(v, names) for v in islice(value.values() if kind in _TABLES else value, _MEMBERS)]
    if issubclass(kind, ModuleType):
        table = attributes_of(value)
        return [] if is_library(table.get("__name__")) else [(table[name], ()) for name in names if name in table]
    return [] if is_library(home_of(kind)) else _inside(value, kind, names)


def _around(function: FunctionType) -> list[Found]:
    """Return what a function has around it; of torch's own only what it was given."""
    names, held, table = _names(function), function.__dict__, function.__globals__
    found: list[Found] = []
    if function.__closure__:
        found += [(contents(cell), names) for cell in function.__closure__]
    if held:
        found += [(held[name], ()) for name in _OF_FUNCTIONS if name in held]
    if function.__defaults__ or function.__kwdefaults__:
        found += [(v, names) for v in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())]
    return found + [(table[name], names) for name in names if name in table] if names else found


def _inside(value: Any, kind: type, names: Names) -> Iterator[Found]:
    """Yield the attributes of an object that are named, its methods among them."""
    attributes = attributes_of(value)
    for name in (*names, "__call__"):
        held = attributes.get(name)
        if held is None:
            held = of_class(kind, name)
            held = MethodType(held, value) if type(held) is FunctionType else None
        if held is not None:
            yield held, names


def _function_of(held: Any) -> Any:
    return held.__func__ if type(held) in (staticmethod, classmethod) else held if type(held) is FunctionType else None


def _names(function: Any) -> Names:
    """Return what the code of a function of the program names."""
    if type(function) is not FunctionType:
        return ()
    code = function.__code__
    known = _named.get(id(code))
    if known is None:
        if len(_named) >= _CODES:
            _named.clear()
        names = () if is_internal(code) else tuple(dict.fromkeys(name for inner in codes_in(code) for name in inner.co_names))
        known = _named[id(code)] = code, names
    return known[1]
