"""What a function or class is made of, and which global names its code reads."""

from __future__ import annotations

import dis
import enum
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch

from whynan.capsule.imports import is_users


def functions_of(cls: type) -> Iterator[FunctionType]:
    """Yield the functions of a class and of those of its bases that are the user's."""
    for base in cls.__mro__:
        module = sys.modules.get(base.__module__)
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
    found: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False) if code is not None else ():
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def reads(code: CodeType) -> list[tuple[str, ...]]:
    """Return the global names a function reads, each with the attributes it reads of it at once.

    >>> reads((lambda x: math.floor(x) + a.b.c).__code__)
    [('math', 'floor'), ('a', 'b', 'c')]
    """
    found: list[tuple[str, ...]] = []
    for part in _codes(code):
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
