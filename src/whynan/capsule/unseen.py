"""Keep our functions, which stand between a line of the program and the torch function it calls, out of its warnings and tracebacks.

Warnings and `logging` count frames upwards from where something is said (`stacklevel=2`), and leave out those of Python's
import system: files with "importlib" and "_bootstrap" in their names. Functions of ours get such a name. It still leads to
their file, and costs nothing while they run. A traceback has every frame; ours are taken out where an exception leaves a door.
"""

from __future__ import annotations

import dis
import functools
import linecache
import os
import sys
from importlib.machinery import SourceFileLoader
from types import CodeType, FunctionType
from typing import Any, Final, TypeVar

from whynan.capsule.sites import is_passer
from whynan.errors import is_interrupted

T = TypeVar("T")
_OURS: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BESIDE: Final = os.path.join("importlib._bootstrap", os.pardir)  # into a folder that need not be there, and out of it again
_LONG, _UNITS = 14, 8  # Python's table of positions: the form of an entry that holds any, and the instructions that one covers


def unseen(thing: T) -> T:
    """Have warnings and logging pass over a function of ours, or the methods of a class, and the functions made in them."""
    for function in vars(thing).values() if isinstance(thing, type) else (thing,):
        function = getattr(function, "__func__", function)
        if type(function) is FunctionType and function.__code__.co_filename.startswith(_OURS):
            function.__code__ = _renamed(function.__code__, _beside(function.__code__.co_filename))
    return thing


@functools.cache
def _beside(file: str) -> str:
    folder, name = os.path.split(file)
    beside = os.path.join(folder, _BESIDE, name)
    linecache.lazycache(beside, {"__name__": name, "__loader__": SourceFileLoader(name, file)})
    return beside


def _renamed(code: CodeType, file: str) -> CodeType:
    inner = tuple(_renamed(const, file) if isinstance(const, CodeType) else const for const in code.co_consts)
    return code.replace(co_filename=file, co_consts=inner)


def leave_out() -> None:
    """Take our frames out of the traceback of the exception that is handled; to be followed by a bare `raise`, which adds none."""
    error = sys.exception()
    assert error is not None
    before, trace = None, error.__traceback__
    while trace is not None:
        following = trace.tb_next
        if not _is_ours(trace.tb_frame.f_code) or is_interrupted(trace):
            before = trace
        elif before is None:
            error.__traceback__ = following
        else:
            before.tb_next = following
        trace = following


def _is_ours(code: CodeType) -> bool:
    return _BESIDE in code.co_filename or is_passer(code)


def stand_for(function: Any, original: Any) -> None:
    """Have a function of ours that does what one of torch's would look like it: like a frame of it, in the last call that it makes."""
    function.__code__ = _like(function.__code__, original.__code__)
    function.__name__, function.__qualname__ = original.__name__, original.__qualname__


@functools.cache  # the compiler asks whether the code of a function is still the one it knows
def _like(code: CodeType, theirs: CodeType) -> CodeType:
    at = [step.positions for step in dis.get_instructions(theirs) if step.opname.startswith("CALL")][-1]
    if at is None or at.lineno is None or at.end_lineno is None or at.col_offset is None or at.end_col_offset is None:
        return code  # Python was told to keep no positions
    place = b"".join(map(_varint, (at.end_lineno - at.lineno, at.col_offset + 1, at.end_col_offset + 1)))
    counts = range(len(code.co_code) // 2, 0, -_UNITS)
    table = b"".join(bytes([0x80 | _LONG << 3 | min(left, _UNITS) - 1, 0]) + place for left in counts)
    return code.replace(co_filename=theirs.co_filename, co_name=theirs.co_name, co_qualname=theirs.co_qualname, co_firstlineno=at.lineno, co_linetable=table)


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 64 else bytes([number & 63 | 64]) + _varint(number >> 6)
