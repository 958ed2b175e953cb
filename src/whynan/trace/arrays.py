"""Find the line at which numpy made a value that is not finite: in code that a replay runs again, or by the warnings numpy gave.

numpy says of each operation whether it divided by zero, overflowed or had no answer, at the place that called it. That is exact; what
became of the value is not followed.
"""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any

from whynan.capsule.imports import is_users
from whynan.capsule.sites import Site, is_installed, is_internal, shorten
from whynan.records import Span
from whynan.trace.lines import used

_WARNED = re.compile(r"(divide by zero|overflow|invalid value) encountered in ")
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that numpy complained about."""

    site: Site
    kind: str
    values: tuple[str, ...]  # what is remarkable about the arrays that the line names


def first_fault(call: Callable[[], Any]) -> Fault | None:
    """Run something and return the first operation of numpy that was asked for more than it can, in the program's own code."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    found: list[Fault] = []

    def hear(kind: str, flag: int) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (is_installed(frame.f_code) or is_internal(frame.f_code)):
            frame = frame.f_back
        if frame is not None and not found:
            found.append(Fault(Site(frame.f_code, frame.f_lasti), kind, tuple(_words(frame))))

    with numpy.errstate(divide="call", over="call", invalid="call", call=hear):
        call()
    return found[0] if found else None


def _words(frame: FrameType) -> list[str]:
    """Say which arrays that a line computes with hold zeros."""
    found = []
    for name, value in used(frame, frame.f_lasti):
        zeros = int((value == 0).sum()) if hasattr(value, "dtype") else int(value == 0)
        if zeros:
            size = getattr(value, "size", 1)
            found.append(f"`{name}` is 0" if size == 1 else f"{zeros} of {size} values of `{name}` are 0")
    return found[:_SHOWN]


def warned(nan: bool) -> tuple[Span, str] | None:
    """Return the one line of the program that numpy has warned of in this run, and what it said; None where there are several, or none."""
    found: dict[tuple[str, int], str] = {}
    kinds = ("invalid value", "divide by zero", "overflow") if nan else ("divide by zero", "overflow")
    for module in list(sys.modules.values()):
        table = getattr(module, "__dict__", {})
        if not isinstance(module, ModuleType) or not isinstance(table.get("__warningregistry__"), dict) or not is_users(module):
            continue
        file = str(module.__file__)
        for key in table["__warningregistry__"]:
            if isinstance(key, tuple) and len(key) == 3 and key[1] is RuntimeWarning and (said := _WARNED.match(str(key[0]))) and said[1] in kinds:
                found.setdefault((file, key[2]), str(key[0]))
    if len(found) != 1:
        return None
    ((file, line), text), *_ = found.items()
    source = linecache.getline(file, line)
    indent = len(source) - len(source.lstrip())
    return Span(shorten(file), line, line, indent, len(source.rstrip()), code=source.strip(), indent=indent), text
