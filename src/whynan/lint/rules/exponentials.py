"""Exponentials that overflow, and the functions people write with them by hand."""

from __future__ import annotations

import ast
import re
from math import inf

from whynan.lint.calls import Operation, operation, same
from whynan.lint.edits import name_of, replaced, source
from whynan.lint.facts import OTHER, TORCH, Fact
from whynan.lint.findings import Confidence, Fix
from whynan.lint.rules.registry import on_binary, on_call
from whynan.lint.spot import HIGH, LOW, MEDIUM, Spot

SHIFTED = re.compile(r"-=? *[\w.]*max\b|-=? *[\w.]*_max|-=? *max_|\.sub_?\([\w.]*max")
"""A maximum is subtracted somewhere in the function."""
_INFERENCE = re.compile(r"\.detach\(\)[\w.()]*\.numpy\(")  # what a trained model gives is handed to numpy


@on_call("exp", "expm1", "exp2", "cosh", "sinh")
def exponential(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at the exponent."""
    if op is None or op.operand is None:
        return
    fact = spot.of(op.operand)
    limit = 11.0 if fact.dtype == "float16" else 88.0
    if fact.owner == OTHER or fact.high <= limit or fact.eased or fact.number is not None or _part_of_hand_written(spot, node):
        return
    if isinstance(op.operand, ast.UnaryOp) and spot.of(op.operand.operand).nonnegative and op.name not in ("cosh", "sinh"):
        return
    sure = _sureness(spot, op.operand, fact)
    if spot.guard(op.operand) == 2:
        return
    words = (f"{op.name} of an unbounded value", f"{op.name} overflows above 88 in float32, 11 in half", "clamp the exponent, or stay in log space")
    spot.report("WN201", *words, spot.sure(sure, TORCH if op.sure else fact.owner), origin=fact.node, origin_label="the exponent was made here")


def _sureness(spot: Spot, operand: ast.expr, fact: Fact) -> Confidence:
    written = spot.text(operand)
    if fact.kind == "difference" and re.search(r"log|old", written):
        return MEDIUM  # the ratio of two probabilities, as in PPO
    if fact.kind in ("linear", "module", "weight", "matmul") or re.search(r"log_?var|log_?std|log_?sigma|logit_scale", written):
        return MEDIUM
    return LOW


def _part_of_hand_written(spot: Spot, node: ast.Call) -> bool:
    """The function written by hand is reported as a whole by its own rule."""
    for outer in spot.above():
        if isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Div) and _is_softmax(spot, outer):
            return True
        op = operation(spot.module, outer) if isinstance(outer, ast.Call) else None
        if op is not None and op.name in ("log", "log1p"):
            return True
    return False


@on_binary(ast.Div)
def by_hand(spot: Spot, node: ast.BinOp) -> None:
    """Look at exp(x) / exp(x).sum(), 1 / (1 + exp(-x)), (exp(x) - exp(-x)) / (exp(x) + exp(-x))."""
    if _is_softmax(spot, node):
        _softmax(spot, node)
        return
    above, below = spot.of(node.left), spot.of(node.right)
    if above.number == 1 and below.kind == "one-plus-exp":
        _sigmoid(spot, node)
    elif _is_tanh(spot, node):
        spot.report("WN303", "tanh written by hand", "exp overflows above 88: inf / inf is nan", "use torch.tanh", HIGH)


def _is_tanh(spot: Spot, node: ast.BinOp) -> bool:
    above, below = node.left, node.right
    if not isinstance(above, ast.BinOp) or not isinstance(below, ast.BinOp) or not isinstance(above.op, ast.Sub) or not isinstance(below.op, ast.Add):
        return False
    return bool(_exponents(spot, above)) and _exponents(spot, above) == _exponents(spot, below)


def _is_softmax(spot: Spot, node: ast.BinOp) -> bool:
    above, below = spot.of(node.left), spot.of(node.right)
    if above.kind not in ("exp", "product", "masked-product") or below.kind not in ("sum-exp", "sum", "masked-sum", "one-plus-exp"):
        return False
    inner = _exponent(spot, node.left)
    if inner is None or spot.of(inner).high <= 88 or spot.of(inner).owner == OTHER or spot.of(inner).eased:
        return False
    if below.kind == "one-plus-exp":
        return True
    base = spot.values.base(node.right, spot.scope)
    other = _exponent(spot, base)
    return same(base, spot.values.base(node.left, spot.scope)) or (other is not None and ast.unparse(other) == ast.unparse(inner))


def _exponent(spot: Spot, node: ast.expr) -> ast.expr | None:
    """x, where an expression is exp(x), through names and views."""
    for _ in range(5):
        if isinstance(node, ast.Name):
            bound = spot.scope.reaching(node.id, (node.lineno, node.col_offset))
            if not bound or bound[0].value is None or bound[0].index is not None or bound[0].patch or bound[0].loop:
                return None
            node = bound[0].value
        elif isinstance(node, ast.Call):
            op = operation(spot.module, node)
            if op is None or op.operand is None:
                return None
            if op.name == "exp":
                return op.operand
            if op.name not in ("sum", "view", "unsqueeze", "squeeze", "reshape", "transpose"):
                return None
            node = op.operand
        elif isinstance(node, ast.Subscript):
            node = node.value
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return _exponent(spot, node.left) or _exponent(spot, node.right)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return _exponent(spot, node.right) or _exponent(spot, node.left)
        else:
            return None
    return None


def _exponents(spot: Spot, node: ast.BinOp) -> list[str]:
    found = [_exponent(spot, node.left), _exponent(spot, node.right)]
    return [ast.unparse(f) for f in found if f is not None] if all(f is not None for f in found) else []


def _softmax(spot: Spot, node: ast.BinOp) -> None:
    if spot.of(node.right).kind == "one-plus-exp":
        inner = _exponent(spot, node.left)
        name = name_of(spot, "torch.sigmoid")
        simple = inner is not None and isinstance(node.left, ast.Call) and name
        fix = replaced(node, f"{name}({source(spot, inner)})", True) if simple and inner is not None else None
        sure = HIGH if inner is not None and not spot.guard(inner) and not _in_where(spot) and not spot.aside else MEDIUM
        spot.report(
            "WN303",
            "sigmoid written by hand",
            "exp(x) overflows above 88: inf / inf is nan",
            "use torch.sigmoid",
            spot.sure(sure, spot.of(node).owner),
            fix=fix,
        )
        return
    inner = _exponent(spot, node.left)
    fact = spot.of(inner)
    words = (
        "softmax written by hand",
        "exp overflows above 88: inf / inf is nan; far below every term is 0",
        "use torch.softmax, or subtract the maximum first",
    )
    plain = spot.of(node.left).kind == "exp"
    bounded = (
        not plain
        or _in_where(spot)
        or spot.of(node.left).eased
        or spot.aside
        or _INFERENCE.search(spot.function_text)
        or SHIFTED.search(spot.function_text)
        or _tempered(spot, inner)
        or fact.high < inf
        or (inner is not None and "log_prob" in ast.unparse(inner))
        or fact.kind in ("unit", "cosine", "scaled-cosine", "arange", "difference")
        or (inner is not None and re.search(r"^-.*(\*\* ?2|pow\(|square)", ast.unparse(inner)) is not None)
        or (inner is not None and spot.guard(inner) > 0)
    )
    fix = _softmax_fix(spot, node, inner)
    spot.report("WN303", *words, spot.sure(MEDIUM if bounded else HIGH, spot.of(node).owner), fix=fix, of=inner)


def _tempered(spot: Spot, inner: ast.expr | None) -> bool:
    """A product of features over a temperature, as in a contrastive loss: such features are normalised, mostly elsewhere."""
    return isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div) and spot.of(inner.left).kind == "matmul"


def _in_where(spot: Spot) -> bool:
    return any(isinstance(o, ast.Call) and isinstance(o.func, ast.Attribute) and o.func.attr == "where" for o in spot.above())


def _softmax_fix(spot: Spot, node: ast.BinOp, inner: ast.expr | None) -> Fix | None:
    total = operation(spot.module, node.right) if isinstance(node.right, ast.Call) else None
    name = name_of(spot, "torch.softmax")
    if total is None or inner is None or not name or not isinstance(node.left, ast.Call):
        return None
    dim, kept = total.argument(1, "dim"), total.argument(2, "keepdim")
    if not (isinstance(kept, ast.Constant) and kept.value is True):
        return None
    return replaced(node, f"{name}({source(spot, inner)}, dim={source(spot, dim)})", True) if dim is not None else None


def _sigmoid(spot: Spot, node: ast.BinOp) -> None:
    inner = _exponent(spot, node.right)
    if inner is None or spot.of(inner).owner == OTHER or spot.of(inner).high <= 88:
        return
    name = name_of(spot, "torch.sigmoid")
    negative = inner.operand if isinstance(inner, ast.UnaryOp) and isinstance(inner.op, ast.USub) else None
    fix = replaced(node, f"{name}({source(spot, negative)})", True) if negative is not None and name else None
    words = ("sigmoid written by hand", "exp(-x) overflows below -88; the value is 0, the gradient inf * 0 is nan", "use torch.sigmoid")
    spot.report("WN201", *words, HIGH if spot.learning and not spot.guard(inner) and spot.of(inner).high == inf else MEDIUM, fix=fix)


@on_call("prod", "cumprod")
def product(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at products over a dimension, which leave the range quickly."""
    if op is None or op.operand is None:
        return
    fact = spot.of(op.operand)
    if fact.owner == TORCH and not (fact.low >= -1 and fact.high <= 1) and fact.kind not in ("size", "integer", "mask"):
        words = ("product over a dimension", "50 factors of 10 pass 3.4e38; 50 of 0.1 are 0", "sum the logarithms and take exp at the end, clamped")
        spot.report("WN203", *words, LOW)
