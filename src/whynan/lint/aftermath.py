"""What becomes of a result further down: searched for NaN, overwritten under a mask, or overwritten before anyone reads it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from whynan.lint.calls import names_in
from whynan.lint.model import Binding

if TYPE_CHECKING:
    from whynan.lint.spot import Spot

_COVERED = re.compile(r"\bwhere\(|isinf|isnan|isfinite|nan_to_num|masked_fill|[\"']inf[\"']|\binf\b|\b(\w+) - \1 == 0")
_HOLDS_FOR_NAN = re.compile(r"isnan|isfinite|isinf|~|!=")  # a comparison of the result with a number does not hold for nan
_LOOKED = 200  # lines further down that are looked at: keeps the time linear
_NEAR = 6  # lines in which a patch belongs to the statement before it


def assigned(statement: ast.stmt) -> set[str]:
    """The names a statement gives a value."""
    targets = getattr(statement, "targets", None) or ([statement.target] if isinstance(statement, ast.AugAssign | ast.AnnAssign) else [])
    return {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}


def covered(spot: Spot) -> bool:
    """Whether the name this statement assigns is searched for infinities or NaN further down, or patched under a mask."""
    names = assigned(spot.statement)
    if not names:
        return False
    if patched(spot):
        return True
    last = min(getattr(spot.scope.node, "end_lineno", None) or len(spot.module.lines), spot.statement.lineno + _LOOKED)
    names |= _derived(spot, names)
    wanted = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b")
    return any(wanted.search(text) for text in _covering(spot.module.lines, spot.statement.lineno - 1, last))


def _derived(spot: Spot, names: set[str]) -> set[str]:
    """The names that are made from these in the lines that follow."""
    end = spot.statement.end_lineno or spot.statement.lineno
    near = ((name, b) for name, bound in spot.scope.bindings.items() for b in bound if end < b.end[0] <= end + _NEAR)
    return {name for name, b in near if b.value is not None and names & names_in(b.value)}


def _covering(lines: list[str], first: int, last: int) -> Iterator[str]:
    """The lines that look for what is not finite, each with the rest of its call."""
    for at in range(first, last):
        if _COVERED.search(lines[at]):
            open_ = lines[at].count("(") > lines[at].count(")")
            yield " ".join(lines[at : at + 4]) if open_ else lines[at]


def patched(spot: Spot) -> bool:
    """Whether a mask that can hold for what is not finite overwrites entries of the result in the lines that follow: `q[n == 0] = 0`."""
    end = spot.statement.end_lineno or spot.statement.lineno
    return any(_near_patch(spot, b, name, end) for name in assigned(spot.statement) for b in spot.scope.bindings.get(name, ()))


def _near_patch(spot: Spot, b: Binding, name: str, end: int) -> bool:
    if not b.patch or not end < b.end[0] <= end + _NEAR or b.key is None or spot.of(b.key).kind != "mask":
        return False
    asked, written = names_in(b.key), ast.unparse(b.key)
    if isinstance(b.key, ast.Name):
        made = spot.scope.reaching(b.key.id, (b.key.lineno, b.key.col_offset)) or []
        written += " ".join(ast.unparse(m.value) for m in made if m.value is not None)
        asked = (asked | {n for m in made if m.value is not None for n in names_in(m.value)}) - {b.key.id}
    return bool(asked - {name, "torch"}) or _HOLDS_FOR_NAN.search(written) is not None


def overwritten(spot: Spot) -> bool:
    """Whether the one name this statement assigns gets another value before anyone reads it."""
    statement = spot.statement
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or not isinstance(statement.targets[0], ast.Name):
        return False
    name, line, end = statement.targets[0].id, statement.lineno, statement.end_lineno or statement.lineno
    later = [b for b in spot.scope.bindings.get(name, ()) if b.end[0] > end]
    siblings = {(a, b) for x in later for a, b, c, d in x.arms if not a <= line <= b and c <= line <= d}
    after = next((x for x in later if not any(a <= x.end[0] <= b for a, b in siblings)), None)
    if after is None or after.patch or after.loop or after.value is None or name in names_in(after.value):
        return False
    if not all(a <= line <= b for a, b, _, _ in after.arms):
        return False
    between = [at for at in range(end + 1, after.value.lineno) if not any(a <= at <= b for a, b in siblings)]
    return not any(re.search(rf"\b{re.escape(name)}\b", spot.module.lines[at - 1]) for at in between)
