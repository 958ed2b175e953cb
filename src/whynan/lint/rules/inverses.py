"""Inverse functions at or past the edge of their range."""

from __future__ import annotations

import ast
from math import inf

from whynan.lint.calls import Operation
from whynan.lint.edits import replaced, source
from whynan.lint.facts import OTHER, TORCH, Fact
from whynan.lint.findings import Fix
from whynan.lint.rules.registry import on_call
from whynan.lint.spot import HIGH, LOW, MEDIUM, Spot

_UNIT = 1 - 6e-8  # what float32 still tells from 1


@on_call("acos", "asin", "atanh", "erfinv")
def on_unit_interval(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at functions defined between -1 and 1."""
    if op is None or op.operand is None:
        return
    fact = spot.of(op.operand)
    if fact.owner == OTHER or (fact.low > -_UNIT and fact.high < _UNIT):
        return
    pole = op.name in ("atanh", "erfinv")
    fix = _clamp_fix(spot, op)
    if fact.low >= -1 and fact.high <= 1:
        _at_the_edge(spot, op, fact, pole, fix)
        return
    if spot.guard(op.operand) == 2 or fact.eased:
        return
    known = fact.kind in ("matmul", "sum", "quotient", "product", "trace", "difference", "linear", "module")
    words = (
        f"{op.name} of a value that can pass 1",
        f"rounding alone takes a cosine past 1, and {op.name}(1.0000001) is nan",
        f"clamp to [-1 + 1e-6, 1 - 1e-6] before {op.name}",
    )
    spot.report(
        "WN107",
        *words,
        spot.sure(MEDIUM if known else LOW, TORCH if op.sure else fact.owner),
        origin=fact.node,
        origin_label="the argument was made here",
        fix=fix,
    )


def _at_the_edge(spot: Spot, op: Operation, fact: Fact, pole: bool, fix: Fix | None) -> None:
    owner = TORCH if op.sure else fact.owner
    if pole:
        words = (f"{op.name} at the edge of its range", f"{op.name}(1) is inf", "clamp to [-1 + 1e-6, 1 - 1e-6], or keep the value before tanh")
        spot.report("WN107", *words, spot.sure(HIGH if fact.kind in ("tanh", "bounded") or fact.node is not None else MEDIUM, owner), fix=fix)
    elif fact.graph and fact.kind not in ("uniform",):
        words = (
            f"slope of {op.name} at 1",
            f"the slope of {op.name} at 1 and -1 is infinite; a clamp at 1 keeps the edge",
            "clamp to [-1 + 1e-6, 1 - 1e-6], or use atan2",
        )
        spot.report("WN501", *words, spot.sure(MEDIUM, owner), fix=fix)


def _clamp_fix(spot: Spot, op: Operation) -> Fix | None:
    if op.operand is None:
        return None
    written = source(spot, op.operand)
    tight = isinstance(op.operand, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return replaced(op.operand, (written if tight else f"({written})") + ".clamp(-1 + 1e-6, 1 - 1e-6)", False)


@on_call("acosh")
def hyperbolic(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at acosh, defined from 1 on."""
    if op is None or op.operand is None:
        return
    fact = spot.of(op.operand)
    if fact.owner == OTHER or fact.low > 1:
        return
    owner = TORCH if op.sure else fact.owner
    if fact.low == 1:
        words = ("slope of acosh at 1", "the slope of acosh at 1 is infinite", "clamp to 1 + 1e-6 from below")
        spot.report("WN501", *words, spot.sure(MEDIUM, owner))
    elif not fact.eased or fact.low == -inf:
        words = ("acosh of a value that can be below 1", "rounding alone takes the argument below 1, where acosh is nan", "clamp to 1 + 1e-6 from below")
        spot.report("WN107", *words, spot.sure(MEDIUM, owner))


@on_call("logit", "icdf", "()icdf")
def quantiles(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at logit and inverse distribution functions, infinite at 0 and 1."""
    if op is not None and (op.argument(1, "eps") is not None):
        return
    argument = op.operand if op is not None else node.args[0] if node.args else None
    fact = spot.of(argument)
    if argument is None or fact.owner == OTHER or (fact.low > 0 and fact.high < 1) or fact.eased:
        return
    name = op.name if op is not None else "icdf"
    sure = HIGH if fact.kind in ("sigmoid", "softmax") and fact.low == 0 else MEDIUM if fact.kind in ("uniform", "bounded") or name == "logit" else LOW
    words = (f"{name} at the edge of its range", f"{name}(0) is -inf and {name}(1) is inf", "clamp to [1e-6, 1 - 1e-6], or give eps")
    spot.report("WN107", *words, spot.sure(sure, TORCH if op is not None and op.sure else fact.owner))


@on_call("lgamma", "digamma", "polygamma")
def poles(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at functions with poles at 0 and the negative whole numbers."""
    if op is None or not op.operands:
        return
    argument = op.operands[-1]
    fact = spot.of(argument)
    if fact.low > 0 or fact.eased or fact.positive or fact.owner == OTHER or fact.number is not None:
        return
    sure = HIGH if fact.kind == "relu" else MEDIUM if fact.nonnegative and fact.kind in ("abs", "square", "sum", "count") else LOW
    words = (f"{op.name} of a value that can be 0", f"{op.name} has a pole at 0", "keep the argument positive: softplus(x) + eps")
    spot.report("WN109", *words, spot.sure(sure, TORCH if op.sure else fact.owner), origin=fact.node, origin_label="the argument was made here")
