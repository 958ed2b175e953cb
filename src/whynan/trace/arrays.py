"""Find the line at which numpy made a value that is not finite: in code that a replay runs again, or by the warnings numpy gave.

numpy says of each operation whether it divided by zero, overflowed or had no answer, at the place that called it. That is exact; what
became of the value is not followed.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from whynan.capsule.sites import Site, is_installed, is_internal, shorten
from whynan.records import Span

_WARNED = re.compile(r"(divide by zero|overflow|invalid value) encountered in ")
_CALLS = {
    "divide by zero": {"log": "WN101", "log2": "WN101", "log10": "WN101", "log1p": "WN101", "power": "WN106", "reciprocal": "WN106", "arctanh": "WN107"},
    "overflow": {"exp": "WN201", "expm1": "WN201", "exp2": "WN201", "sinh": "WN201", "cosh": "WN201"},
    "invalid value": {"log": "WN102", "log2": "WN102", "log10": "WN102", "log1p": "WN102", "sqrt": "WN105", "power": "WN105",
                      "arccos": "WN107", "arcsin": "WN107", "arccosh": "WN107", "arctanh": "WN107", "multiply": "WN302"},
}  # fmt: skip
_OPERATORS: dict[str, dict[type[ast.operator], str]] = {
    "divide by zero": {ast.Div: "WN103", ast.Pow: "WN106"},
    "overflow": {},
    "invalid value": {ast.Div: "WN104", ast.Pow: "WN105", ast.Sub: "WN301", ast.Add: "WN301", ast.Mult: "WN302"},
}
_OTHERWISE = {"divide by zero": "WN103", "overflow": "WN203"}
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
    """Say which arrays that a line names hold zeros, or nothing but one value."""
    found = []
    named = frame.f_code.co_varnames + frame.f_code.co_freevars
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    for name in named:
        value: Any = frame.f_locals.get(name)
        if not re.search(rf"\b{re.escape(name)}\b", line) or getattr(getattr(value, "dtype", None), "kind", "") != "f" or not value.size:
            continue
        zeros = int((value == 0).sum())
        if zeros:
            found.append(f"`{name}` is 0" if value.size == 1 else f"{zeros} of {value.size} values of `{name}` are 0")
    return found[:_SHOWN]


def code_of(fault: Fault, node: ast.AST | None) -> str:
    """Return the code of what numpy complained about, by the expression at that place; nothing where it does not say."""
    if isinstance(node, ast.BinOp | ast.AugAssign):
        return _OPERATORS[fault.kind].get(type(node.op)) or _OTHERWISE.get(fault.kind, "")
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("divide", "true_divide"):
            return _OPERATORS[fault.kind].get(ast.Div, "")
        return _CALLS[fault.kind].get(name, "WN203" if fault.kind == "overflow" else "")
    return ""


def warned(nan: bool) -> tuple[Span, str] | None:
    """Return the one line of the program that numpy has warned of in this run, and what it said; None where there are several, or none."""
    found: dict[tuple[str, int], str] = {}
    kinds = ("invalid value", "divide by zero", "overflow") if nan else ("divide by zero", "overflow")
    for module in list(sys.modules.values()):
        table = getattr(module, "__dict__", {})
        file = table.get("__file__")
        if (
            not isinstance(file, str)
            or not isinstance(table.get("__warningregistry__"), dict)
            or is_internal(code := compile("", file, "exec"))
            or is_installed(code)
        ):
            continue
        for key in table["__warningregistry__"]:
            if isinstance(key, tuple) and len(key) == 3 and key[1] is RuntimeWarning and (said := _WARNED.match(str(key[0]))) and said[1] in kinds:
                found.setdefault((file, key[2]), str(key[0]))
    if len(found) != 1:
        return None
    ((file, line), text), *_ = found.items()
    source = linecache.getline(file, line)
    indent = len(source) - len(source.lstrip())
    return Span(shorten(file), line, line, indent, len(source.rstrip()), code=source.strip(), indent=indent), text
