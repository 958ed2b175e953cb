"""Roots and powers: of a negative number, of 0 with an exponent below 0, and the infinite slope at 0."""

from __future__ import annotations

import ast
from math import inf

from whynan.lint.aftermath import patched
from whynan.lint.calls import Operation, operation
from whynan.lint.edits import name_of, replaced, source
from whynan.lint.facts import OTHER, TINY, TORCH, Fact
from whynan.lint.findings import Confidence, Fix
from whynan.lint.rules.registry import on_binary, on_call
from whynan.lint.spot import HIGH, LOW, MEDIUM, Spot

_SQUARES = frozenset({"sum-squares", "mean-squares", "square", "var"})
_SIGNED = frozenset(
    {"difference", "linear", "matmul", "normal", "cancelled-variance", "one-minus", "weight", "negated", "tanh", "sin", "cos", "cosine", "quotient", "module"}
)


@on_call("sqrt")
def square_root(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at sqrt."""
    if op is not None and op.operand is not None:
        _root(spot, op.operand, TORCH if op.sure else spot.of(op.operand).owner, "sqrt")


@on_call("rsqrt", "reciprocal")
def inverse_root(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at rsqrt and reciprocal."""
    if op is not None and op.operand is not None:
        _negative_power(spot, op.operand, TORCH if op.sure else spot.of(op.operand).owner, op.name)


@on_call("pow")
def called_power(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at torch.pow(x, n) and x.pow(n)."""
    if op is not None and len(op.operands) >= 2:
        _power(spot, op.operands[0], op.operands[1], TORCH if op.sure else spot.of(op.operands[0]).owner)


@on_binary(ast.Pow)
def written_power(spot: Spot, node: ast.BinOp) -> None:
    """Look at x ** n."""
    _power(spot, node.left, node.right, spot.of(node.left).owner)


def _power(spot: Spot, base: ast.expr, exponent: ast.expr, owner: int) -> None:
    n, fact = spot.of(exponent).number, spot.of(base)
    if fact.number is not None or owner == OTHER or fact.owner == OTHER:
        return
    if n is None:
        _unknown_exponent(spot, base, exponent, fact, owner)
    elif n == 0.5:
        _root(spot, base, owner, "** 0.5")
    elif n < 0:
        _negative_power(spot, base, owner, f"** {n:g}")
    elif n != int(n):
        _fraction(spot, base, fact, owner, n)


def _unknown_exponent(spot: Spot, base: ast.expr, exponent: ast.expr, fact: Fact, owner: int) -> None:
    if owner != TORCH or spot.of(exponent).kind in ("loop", "integer", "arange", "size"):
        return
    if fact.low < 0 and not fact.eased and spot.of(exponent).kind == "weight":
        words = ("power of a value that can be negative", "a fractional power of a negative number is nan", "clamp the base from below by an eps")
        spot.report("WN105", *words, MEDIUM)


def _fraction(spot: Spot, base: ast.expr, fact: Fact, owner: int, n: float) -> None:
    guard = spot.guard(base)
    if guard == 2 or _covered(spot):
        return
    if fact.low < 0 and not fact.eased:
        sure = MEDIUM if fact.kind in _SIGNED else LOW
        words = (
            f"power {n:g} of a value that can be negative",
            "a fractional power of a negative number is nan",
            "clamp the base from below, or use sign(x) * abs(x) ** p",
        )
        spot.report("WN105", *words, spot.sure(sure, owner))
    elif n < 1 and fact.low == 0 and fact.can_be_zero and fact.graph:
        words = (f"slope of x ** {n:g} at 0", "the slope at 0 is infinite; inf * 0 is nan", "add an eps to the base, or work in log space")
        spot.report("WN501", *words, spot.sure(_steepness(spot, base, fact), owner), origin=fact.node, origin_label="the base was made here", of=base)
    elif n < 1 and fact.low == 0 and fact.positive and fact.kind in ("probability", "exp") and fact.graph:
        spot.report(
            "WN501",
            f"slope of x ** {n:g} at 0",
            "exp underflows to 0, where the slope is infinite",
            "add an eps to the base, or work in log space",
            spot.sure(MEDIUM, owner),
        )


def _steepness(spot: Spot, base: ast.expr, fact: Fact) -> Confidence:
    """High where exact zeros are ordinary: a relu, squares or absolute values of what was handed in, saturated probabilities."""
    if not spot.learning or not spot.flows(base):
        return MEDIUM
    ordinary = fact.kind in ("relu", "softmax", "one-minus-sigmoid", "one-minus-softmax") or (
        fact.kind in (*_SQUARES, "abs", "root-sum-squares") and spot.direct(_unreduced(spot, base))
    )
    return HIGH if ordinary else MEDIUM


def _negative_power(spot: Spot, base: ast.expr, owner: int, how: str) -> None:
    fact = spot.of(base)
    if not fact.can_be_zero or fact.number is not None or fact.owner == OTHER or spot.guard(base) == 2 or _covered(spot):
        return
    sure = LOW
    if fact.nonnegative and fact.kind in (
        "sum-squares",
        "mean-squares",
        "var",
        "std",
        "norm",
        "mask-sum",
        "count",
        "masked-sum",
        "sum-abs",
        "scattered-sum",
        "relu",
        "root-sum-squares",
        "distance",
    ):
        sure = HIGH
    elif fact.nonnegative and fact.kind in ("sum", "mean", "power", "root", "max", "sum-of-two", "product"):
        sure = MEDIUM
    if spot.guard(base) == 1 or (sure is HIGH and fact.kind not in ("mask-sum", "count") and not spot.direct(_unreduced(spot, base))):
        sure = sure.lowered()
    if spot.covered_later():
        sure = LOW
    words = (f"{how} of a value that can be 0", f"`{spot.text(base)}` can be 0: its inverse is inf", "add an eps before the power")
    spot.report("WN106", *words, spot.sure(sure, owner), origin=fact.node, origin_label="it was made here", of=base)


def _root(spot: Spot, base: ast.expr, owner: int, how: str) -> None:
    fact = spot.of(base)
    if fact.number is not None or fact.owner == OTHER or owner == OTHER or _covered(spot):
        return
    guard = spot.guard(base)
    if guard == 2:
        return
    if fact.low < 0 and not fact.eased:
        _root_of_negative(spot, base, fact, owner, how)
    elif fact.eased or fact.low > 0:
        _small_eps(spot, base, fact, owner)
    elif fact.graph and fact.low == 0 and not fact.positive:
        _slope(spot, base, fact, owner, how, guard)


def _root_of_negative(spot: Spot, base: ast.expr, fact: Fact, owner: int, how: str) -> None:
    if fact.kind == "cancelled-variance":
        words = (
            "root of a variance that cancels below 0",
            "mean(x²) - mean(x)² rounds below 0 where the spread is small",
            "use x.var(unbiased=False), or clamp at 0 and add an eps",
        )
        spot.report("WN105", *words, spot.sure(HIGH, owner))
        return
    sure = MEDIUM if fact.kind in ("linear", "normal", "cancelled-variance") else LOW
    words = ("root of a value that can be negative", "the root of a negative number is nan; at 0 the slope is infinite", "clamp it from below by an eps")
    if owner == TORCH:
        spot.report("WN105", *words, sure, origin=fact.node, origin_label="the argument was made here")


def _small_eps(spot: Spot, base: ast.expr, fact: Fact, owner: int) -> None:
    """An eps of 1e-20 keeps the root finite, but its slope is 5e9, and in half it is 0."""
    if TINY < fact.low <= 1e-15 and owner == TORCH and fact.graph:
        words = (
            "eps under a root that is too small",
            f"the slope at 0 is {0.5 / fact.low**0.5:.0e}; in float16 the eps is 0",
            "use an eps of ordinary size: 1e-6, in half 1e-4",
        )
        spot.report("WN204", *words, MEDIUM)


def _slope(spot: Spot, base: ast.expr, fact: Fact, owner: int, how: str, guard: int) -> None:
    sure: Confidence = HIGH if fact.kind in _SQUARES else MEDIUM if fact.kind not in ("", "sum", "mean") else LOW
    if guard:
        sure = sure.lowered()
    outside = _eps_outside(spot)
    note = "the eps outside the root does not help: the slope is taken inside" if outside else ""
    if sure is HIGH and not (spot.learning and spot.direct(_unreduced(spot, base)) and spot.flows(base) and not patched(spot)):
        sure = MEDIUM
    words = (
        f"slope of {how} at 0",
        f"`{spot.text(base)}` is 0 for equal or zero inputs: the slope is infinite; inf * 0 is nan",
        "add the eps under the root, or use torch.linalg.vector_norm",
    )
    made = "the argument was made here"
    spot.report("WN501", *words, spot.sure(sure, owner), origin=fact.node, origin_label=made, fix=_norm_fix(spot, base), note=note, of=base)


def _unreduced(spot: Spot, node: ast.expr) -> ast.expr:
    """What was squared and summed."""
    base = spot.values.base(node, spot.scope)
    squared = _squared(spot, base)
    return squared if squared is not None else base


def _eps_outside(spot: Spot) -> bool:
    outer = spot.parents.get(id(spot.node))
    if not isinstance(outer, ast.BinOp) or not isinstance(outer.op, ast.Add):
        return False
    other = spot.of(outer.right if outer.left is spot.node else outer.left)
    return other.kind == "epsilon" or (other.number is not None and 0 < other.number < 1e-2)


def _covered(spot: Spot) -> bool:
    return any(isinstance(o, ast.Call) and isinstance(o.func, ast.Attribute) and o.func.attr in ("where", "nan_to_num", "masked_fill") for o in spot.above())


def _norm_fix(spot: Spot, base: ast.expr) -> Fix | None:
    """sqrt((x ** 2).sum(dim)) → vector_norm(x, dim=dim)."""
    if not isinstance(base, ast.Call) or not isinstance(spot.node, ast.expr):
        return None
    total = operation(spot.module, base)
    if total is None or total.name != "sum" or total.operand is None:
        return None
    squared = _squared(spot, total.operand)
    name = name_of(spot, "torch.linalg.vector_norm")
    if squared is None or not name:
        return None
    positional = [source(spot, a) for a in base.args[1 if total.module else 0 :]]
    if len(positional) > 2 or any(k not in ("dim", "axis", "keepdim", "keepdims") for k in total.keywords):
        return None
    parts = [f"{k}={v}" for k, v in zip(("dim", "keepdim"), positional, strict=False)]
    parts += [f"{'dim' if k == 'axis' else 'keepdim' if k == 'keepdims' else k}={source(spot, v)}" for k, v in total.keywords.items()]
    return replaced(spot.node, f"{name}({', '.join([source(spot, squared), *parts])})", True)


def _squared(spot: Spot, node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Pow) and spot.of(node.right).number == 2:
            return node.left
        return node.left if isinstance(node.op, ast.Mult) and ast.dump(node.left) == ast.dump(node.right) else None
    op = operation(spot.module, node) if isinstance(node, ast.Call) else None
    if op is None or op.operand is None:
        return None
    if op.name == "square" or (op.name == "pow" and len(op.operands) == 2 and spot.of(op.operands[1]).number == 2):
        return op.operand
    return None


@on_call("hypot")
def hypotenuse(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at hypot, whose slope at the origin is 0 / 0."""
    if op is not None and len(op.operands) >= 2:
        fact = spot.of(op.operands[0])
        if fact.low < inf and not fact.eased:
            words = ("slope of hypot at the origin", "the slope of hypot(0, 0) is 0 / 0", "write sqrt(a * a + b * b + eps)")
            spot.report("WN501", *words, spot.sure(MEDIUM, TORCH if op.sure else fact.owner))
