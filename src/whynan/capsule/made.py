"""What a function or class is made of, and which global names its code reads."""

from __future__ import annotations

import dis
import enum
import sys
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch

from whynan.capsule.imports import is_users

MISSING = object()  # what a variable holds that has no value
_mro_of, _table_of = type.__dict__["__mro__"].__get__, type.__dict__["__dict__"].__get__  # also where a metaclass says something else


def functions_of(cls: type) -> Iterator[FunctionType]:
    """Yield the functions of a class and of those of its bases that are the user's."""
    for base in cls.__mro__:
        home = home_of(base)
        module = sys.modules.get(home) if isinstance(home, str) else None
        if module is None or not is_users(module):
            continue
        for value in vars(base).values():
            for candidate in (value, *(getattr(value, name, None) for name in ("__func__", "__wrapped__", "fget", "fset", "func"))):
                if isinstance(candidate, FunctionType):
                    yield candidate


def settings_of(cls: type) -> dict[str, Any]:
    """Return the plain values and tensors among the attributes of a class: a program may set them anywhere."""
    kinds = (type(None), bool, int, float, str, torch.Tensor)
    found = {} if issubclass(cls, enum.Enum) else dict(vars(cls))
    return {name: value for name, value in found.items() if type(value) in kinds and not name.startswith("__")}


def parts(function: FunctionType) -> Iterator[FunctionType | type]:
    """Yield the functions and classes that a function holds: the one it was put around, those of its closure."""
    held = [getattr(function, "__wrapped__", None), *cells(function).values()]
    for value in [*held, *(v for table in held if type(table) is dict for v in list(table.values())[:64])]:
        inner = value if isinstance(value, FunctionType | type) else getattr(value, "__wrapped__", None)
        if isinstance(inner, FunctionType | type):
            yield inner


def cells(function: Any) -> dict[str, Any]:
    """Return what a function holds of the function around it, by name.

    >>> cells((lambda x: lambda: x)(1))
    {'x': 1}
    """
    code = getattr(function, "__code__", None)
    held = zip(code.co_freevars, map(contents, function.__closure__ or ()), strict=False) if code is not None else ()
    return {name: value for name, value in held if value is not MISSING}


def contents(cell: CellType) -> Any:
    """Return what a variable of an outer function holds."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return MISSING


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of the functions made in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the table of an object's own attributes; an empty one where it has none, or its class says something else in its place.

    >>> attributes_of(len), attributes_of(1)
    ({}, {})
    """
    described = of_class(type(value), "__dict__")
    table = described.__get__(value) if type(described) in (GetSetDescriptorType, MemberDescriptorType) else None
    return table if type(table) is dict else {}


def of_class(kind: type, name: str) -> Any:
    """Return what a class, or the first of its bases that does, has under a name, as it stands there; None where none has."""
    for cls in _mro_of(kind):
        if name in (table := _table_of(cls)):
            return table[name]
    return None


def home_of(kind: type) -> Any:
    """Return what a class says of the module it stands in: mostly a name."""
    return _table_of(kind).get("__module__")


def reads(code: CodeType) -> list[tuple[str, ...]]:
    """Return the global names a function reads, each with the attributes it reads of it at once.

    >>> reads((lambda x: math.floor(x) + a.b.c).__code__)
    [('math', 'floor'), ('a', 'b', 'c')]
    """
    found: list[tuple[str, ...]] = []
    for part in codes_in(code):
        chain: tuple[str, ...] = ()
        for instruction in dis.get_instructions(part):
            if instruction.opname == "EXTENDED_ARG":
                continue
            if chain and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain = (*chain, instruction.argval)
                continue
            found += [chain] if chain else []
            chain = (instruction.argval,) if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    return list(dict.fromkeys(found))
