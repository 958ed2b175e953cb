"""Building fixes: replacements of expressions in the source."""

from __future__ import annotations

import ast

from whynan.lint.findings import Edit, Fix
from whynan.lint.spot import Spot, place

_TIGHT = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant | ast.Tuple | ast.List


def source(spot: Spot, node: ast.expr) -> str:
    """The text of an expression as written."""
    lines = spot.module.lines
    first, last = node.lineno, node.end_lineno or node.lineno
    rows = [line.encode() for line in lines[first - 1 : last]]
    if not rows:
        return ast.unparse(node)
    rows[-1] = rows[-1][: node.end_col_offset]
    rows[0] = rows[0][node.col_offset :]
    return b"\n".join(rows).decode()


def replaced(node: ast.expr, text: str, safe: bool) -> Fix:
    """Replace an expression."""
    return Fix((Edit(place(node), text),), safe)


def wrapped(spot: Spot, node: ast.expr, suffix: str) -> Fix | None:
    """Append a method call to an expression; changes results, so never safe."""
    if spot.of(node).owner != 1:
        return None
    written = source(spot, node)
    return replaced(node, (written if isinstance(node, _TIGHT) else f"({written})") + suffix, safe=False)


def name_of(spot: Spot, dotted: str) -> str:
    """How a torch function is written in this file, through its imports.

    The shortest alias wins: `F.logsigmoid` where `import torch.nn.functional as F` stands.
    """
    best = dotted
    for alias, full in spot.module.imports.items():
        if dotted.startswith(full + "."):
            short = alias + dotted[len(full) :]
            best = short if len(short) < len(best) else best
    return best if best != dotted or "torch" in spot.module.imports else ""


def rest_of_call(spot: Spot, call: ast.Call, skip: int) -> str:
    """The arguments of a call after the first ones, as text with a leading comma."""
    parts = [source(spot, a) for a in call.args[skip:]] + [f"{k.arg}={source(spot, k.value)}" for k in call.keywords if k.arg]
    return "".join(f", {p}" for p in parts)
