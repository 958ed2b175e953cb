"""A probability that was picked so that it is not 0: the largest of its row, or that of an action drawn from it."""

from __future__ import annotations

import ast
import re

from whynan.lint.callers import made_of
from whynan.lint.calls import names_in, operation
from whynan.lint.model import Scope
from whynan.lint.operations import VIEWS

_LARGEST = re.compile(r"argmax|\.max\(|topk|torch\.max\(")
_DRAWN = re.compile(r"multinomial\(|\.r?sample\(")
_NAMED = re.compile(r"(^|_|\b)actions?(_|\b|$)")
_STEPS = 6


def picked(node: ast.expr, scope: Scope) -> int:
    """2: at its own largest entry, or at what was drawn in this function; 1: at what is called an action; 0: neither."""
    found = _index(node, scope)
    if found is None:
        return 0
    values, index = found
    written = made_of(index, scope)
    if _DRAWN.search(written) or (_LARGEST.search(written) and any(re.search(rf"\b{re.escape(n)}\b", written) for n in names_in(values) - {"self", "torch"})):
        return 2
    return 1 if _NAMED.search(written) else 0


def _index(node: ast.expr, scope: Scope) -> tuple[ast.expr, ast.expr] | None:
    """What is indexed and by what, through names and views."""
    for _ in range(_STEPS):
        if isinstance(node, ast.Name):
            bound = scope.reaching(node.id, (node.lineno, node.col_offset))
            if not bound or bound[0].value is None or bound[0].loop or bound[0].patch or bound[0].index is not None:
                return None
            node = bound[0].value
        elif isinstance(node, ast.Subscript):
            return node.value, node.slice
        elif isinstance(node, ast.Call):
            op = operation(scope.module, node)
            if op is None or op.operand is None:
                return None
            index = op.argument(2, "index") if op.name == "gather" else op.argument(1, "indices") if op.name == "take_along_dim" else None
            if index is not None:
                return op.operand, index
            if op.name not in VIEWS:
                return None
            node = op.operand
        else:
            return None
    return None
