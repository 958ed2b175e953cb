"""The models that a call runs which is recorded whole: a compiled function, a checkpointed one, an `autograd.Function`.

No door hears of them inside it. They are found by what code names: its arguments, its closure, its globals, and the
attributes of objects among these. None of it is run for that, no property and no `__getattr__`.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from whynan.capsule.sites import is_internal
from whynan.capsule.state.surroundings import codes_in, contents

_DEEPEST = 8  # from one thing to the next
_MOST = 256  # things that are looked at in one call
_MEMBERS = 64  # of a container
_NOTHING = frozenset({torch.Tensor, torch.nn.Parameter, int, float, bool, str, bytes, type(None), torch.dtype, torch.device})
_OF_FUNCTIONS = ("_torchdynamo_orig_callable", "__wrapped__")
_LIBRARIES = ("torch", "numpy", "builtins")

Names = tuple[str, ...]
Found = tuple[Any, Names]  # a value, and the names that the code around it knows
_Seen = dict[tuple[int, int], Any]  # by the numbers of both; holds the values: another would get the number of one that is gone


def modules_of(fn: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.nn.Module]:
    """Return the modules that a call may run, outermost ones as they are named.

    Cost: 4 µs for a function of torch that is given tensors, 15 to 30 µs for one of the program's.
    """
    found: dict[int, torch.nn.Module] = {}
    seen: _Seen = {}
    given = [v for v in (*args, *kwargs.values()) if type(v) not in _NOTHING]
    _follow([fn, *filter(callable, given)], (), found, seen)
    if data := [v for v in given if not callable(v)]:  # what is run knows names of what it is given
        names = tuple(dict.fromkeys(name for value in seen.values() if type(value) is FunctionType for name in _names(value)))
        _follow(data, names, found, seen)
    return list(found.values())


def _follow(values: list[Any], names: Names, found: dict[int, torch.nn.Module], seen: _Seen) -> None:
    todo: deque[tuple[Any, Names, int]] = deque((v, names, 0) for v in values)
    while todo and len(seen) < _MOST:
        value, names, depth = todo.popleft()
        if (id(value), id(names)) in seen:
            continue
        seen[id(value), id(names)] = value
        if isinstance(value, torch.nn.Module):
            found[id(value)] = value
        elif depth < _DEEPEST:
            todo.extend((v, known, depth + 1) for v, known in _behind(value, names) if type(v) not in _NOTHING)


def _behind(value: Any, names: Names) -> Iterator[Found]:
    """Yield what a value leads to."""
    kind = type(value)
    if kind is FunctionType:
        yield from _around(value)
    elif kind is MethodType:
        yield value.__func__, ()
        yield value.__self__, _names(value.__func__)
    elif kind is functools.partial:
        yield from ((v, ()) for v in (value.func, *value.args, *value.keywords.values()))
    elif kind in (list, tuple, dict, OrderedDict):
        yield from ((v, names) for v in list(value.values() if isinstance(value, dict) else value)[:_MEMBERS])
    elif isinstance(value, type):
        if issubclass(value, torch.autograd.Function):  # its class methods are what is run
            yield from ((getattr(vars(value).get(name), "__func__", None), ()) for name in ("forward", "backward"))
    elif isinstance(value, ModuleType):
        yield from ((vars(value)[name], ()) for name in names if name in vars(value) and not value.__name__.startswith(_LIBRARIES))
    elif kind.__dictoffset__ and not kind.__module__.startswith(_LIBRARIES):
        yield from _inside(value, kind, names)


def _around(function: FunctionType) -> Iterator[Found]:
    """Yield what a function has around it; of torch's own only what it was given."""
    names = _names(function)
    yield from ((contents(cell), names) for cell in function.__closure__ or ())
    yield from ((function.__dict__[name], ()) for name in _OF_FUNCTIONS if name in function.__dict__)
    yield from ((v, names) for v in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
    table = function.__globals__
    yield from ((table[name], names) for name in names if name in table)


def _inside(value: Any, kind: type, names: Names) -> Iterator[Found]:
    """Yield the attributes of an object that are named, its methods among them."""
    for name in (*names, "__call__"):
        held = vars(value).get(name)
        if held is None:
            held = next((vars(cls)[name] for cls in kind.__mro__ if name in vars(cls)), None)
            held = MethodType(held, value) if type(held) is FunctionType else None
        if held is not None:
            yield held, names


def _names(function: Any) -> Names:
    code = getattr(function, "__code__", None)
    return _named(code) if isinstance(code, CodeType) and not is_internal(code) else ()


@functools.lru_cache(maxsize=1024)
def _named(code: CodeType) -> Names:
    return tuple(dict.fromkeys(name for inner in codes_in(code) for name in inner.co_names))
