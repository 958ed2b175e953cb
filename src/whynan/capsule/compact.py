"""Objects made in C that can be made again from a few words: a function by its name, a cache by what it wraps, a value by its reduction."""

from __future__ import annotations

import collections
import copyreg
import enum
import functools
import operator
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

_TEXT, _ITEMS, _DEPTH = 4096, 64, 4  # of what an object is made from: more is data
_NAMED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_BASES = (dict, list, tuple, set, types.SimpleNamespace)
_BY_A_STATEMENT = 1 << 9  # Py_TPFLAGS_HEAPTYPE; a type made in C may have it too
_NEVER_MADE = 1 << 7  # Py_TPFLAGS_DISALLOW_INSTANTIATION
_WORDS = 3  # of an object: its head, its dictionary, its weak references


def named(value: Any) -> tuple[str, str] | None:
    """Return the module and the name under which a function made in C is found again.

    >>> named(len), named(str.upper), named([].append)
    (('builtins', 'len'), ('builtins', 'str.upper'), None)
    """
    if not (isinstance(value, _NAMED) or type(value).__name__ == "ufunc"):
        return None
    name = getattr(value, "__qualname__", None) or value.__name__
    for owner in (value, getattr(value, "__objclass__", None), type(value)):
        home = getattr(owner, "__module__", None)
        try:
            if isinstance(home, str) and operator.attrgetter(name)(sys.modules[home]) is value:
                return home, name
        except (AttributeError, KeyError):
            continue
    return None


def cached(value: Any) -> tuple[Callable[..., Any], Mapping[str, Any]] | None:
    """Return the function that a `functools.lru_cache` is around, and how large the cache is."""
    return (value.__wrapped__, value.cache_parameters()) if isinstance(value, functools._lru_cache_wrapper) else None


def reduced(value: Any) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """Return a function and small plain arguments that make an object again, as `copy` would; None where there are none.

    >>> reduced(operator.itemgetter(2))
    (<class 'operator.itemgetter'>, (2,))
    """
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        made = reduce(value) if reduce is not None else value.__reduce_ex__(2)
    except Exception:
        return None
    if not isinstance(made, tuple) or len(made) < 2 or any(part is not None for part in made[2:]) or not isinstance(made[1], tuple):
        return None
    return (made[0], made[1]) if callable(made[0]) and _is_small(made[1], _DEPTH) else None


def _is_small(value: Any, depth: int) -> bool:
    if isinstance(value, str | bytes):
        return len(value) <= _TEXT
    if type(value) in (tuple, list, dict):
        items = [*value.keys(), *value.values()] if type(value) is dict else value
        return depth > 0 and len(items) <= _ITEMS and all(_is_small(item, depth - 1) for item in items)
    return value is None or isinstance(value, bool | int | float | type | enum.Enum)


def base_of(kind: type) -> type | None:
    """Return what `__new__` makes for a class: a plain object or a built-in container; None for anything made in C."""
    if issubclass(kind, collections.defaultdict):
        return None  # its default is not among its items
    for base in _BASES:
        if issubclass(kind, base):
            return base
    return None if any(_is_made_in_c(cls) for cls in kind.__mro__ if cls is not object) else object


def _is_made_in_c(cls: type) -> bool:
    slots = sum(isinstance(v, types.MemberDescriptorType) for base in cls.__mro__ for v in vars(base).values())
    holds_more = cls.__basicsize__ > object.__basicsize__ + 8 * (_WORDS + slots)
    own_new = isinstance(vars(cls).get("__new__"), types.BuiltinFunctionType)
    return not cls.__flags__ & _BY_A_STATEMENT or bool(cls.__flags__ & _NEVER_MADE) or own_new or holds_more
