"""Conditions that ask about a value before it is used."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right

from whynan.lint.calls import names_in
from whynan.lint.model import Scope

_NOT_A_GUARD = re.compile(
    r"is None|is not None|isinstance|hasattr|\.ndim|\.dim\(\)|\.training|\.requires_grad|\.dtype|\.device|torch\.jit|is_compiling|__debug__"
)
_ABOUT_NAN = re.compile(r"nan\b|isfinite|isinf")
_TESTS = 200  # conditions that are looked at: keeps the time linear
_UNINTERESTING = frozenset({"self", "torch", "F", "nn", "np", "math", "dim", "keepdim", "cls"})


def guard(node: ast.expr, scope: Scope, line: int, whole: bool = False) -> int:
    """2: a condition before a line asks about exactly this expression; 1: about something in it; 0: none does.

    Whole: a name counts only where it stands by itself and its values are asked about, not its shape.
    """
    exact = {ast.unparse(node)}
    names = names_in(node) - _UNINTERESTING
    for name in list(names):
        for bound in scope.bindings.get(name, [])[-2:]:
            if bound.value is not None and not bound.loop:
                names |= names_in(bound.value) - _UNINTERESTING
                exact |= {ast.unparse(bound.value)} if isinstance(node, ast.Name) else set()
    best = 0
    tests = scope.tests
    last = bisect_right(tests, line, key=lambda t: t[0].lineno)
    for _, written, asked in tests[max(last - _TESTS, 0) : last]:
        if _NOT_A_GUARD.search(written) or (whole and _ABOUT_NAN.search(written)):
            continue
        if any(_holds(written, e, whole) for e in exact):
            return 2
        if names & asked:
            best = 1
    return best


def _holds(written: str, asked: str, whole: bool) -> bool:
    if whole:
        return re.search(rf"(?<![\w.]){re.escape(asked)}(?!\w|\.shape|\.size|\.device)", written) is not None
    return asked in written and (len(asked) > 1 or re.search(rf"\b{re.escape(asked)}\b", written) is not None)
