"""Operations whose result depends on more than their operand: clamps, where, fills, casts, arithmetic."""

from __future__ import annotations

import ast
import re
from math import inf
from typing import TYPE_CHECKING

from whynan.lint import facts
from whynan.lint.calls import Operation, same
from whynan.lint.facts import OTHER, TORCH, Fact, join
from whynan.lint.model import Scope

if TYPE_CHECKING:
    from whynan.lint.values import Values

_DTYPES = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16", "float32": "float32", "float": "float32", "float64": "float64", "double": "float64"}


def extreme(name: str, parts: list[Fact]) -> Fact:
    """The larger or smaller of several values."""
    pick = max if name in ("max", "maximum") else min
    low, high = pick(p.low for p in parts), pick(p.high for p in parts)
    return Fact(
        "bounded",
        low,
        high,
        facts.owner(*parts),
        eased=any(p.eased for p in parts),
        graph=any(p.graph for p in parts),
        positive=any(p.positive for p in parts),
    )


def gathered(values: Values, parts: ast.Tuple | ast.List, scope: Scope) -> Fact:
    """cat, stack: one of several; with a part that is never 0 or never masked, neither is the whole."""
    found = [values.of(x, scope) for x in parts.elts[:4]]
    return join(found).but(eased=any(f.eased or f.low > 0 for f in found), number=None, masked=all(f.masked for f in found))


def dtype_of(node: ast.expr | None) -> str:
    """The dtype that an expression such as torch.float16 names, or ""."""
    return _DTYPES.get(node.attr, "") if isinstance(node, ast.Attribute) else ""


def special(values: Values, op: Operation, base: Fact, scope: Scope) -> Fact | None:
    """Operations whose arguments matter."""
    if _trained(op, base):
        return Fact("weight", owner=TORCH, dtype=base.dtype)
    match op.name:
        case "clamp" | "clamp_min" | "clamp_max":
            return _clamped(values, op, base, scope)
        case "maximum" | "minimum":
            return extreme(op.name, [base, values.of(op.argument(1, "other"), scope)])
        case "max" | "min" if len(op.operands) == 2 and not _is_dimension(values, op.operands[1], scope):
            return _larger(op.name, base, values.of(op.operands[1], scope))
        case "where":
            if len(op.operands) < 3:
                return None
            chosen = join([values.of(op.operands[1], scope), values.of(op.operands[2], scope)])
            return chosen.but(eased=True, node=op.call)
        case "masked_fill":
            value = values.of(op.argument(2, "value"), scope)
            if value.low == value.high == -inf:
                return base.but(masked=True, node=op.call)
            return base.but(low=min(base.low, value.low), high=max(base.high, value.high), eased=True)
        case "add" | "sub" | "mul" | "div":
            return _arithmetic(values, op, base, scope)
        case "pow":
            return facts.power(base, values.of(op.argument(1, "exponent"), scope))
        case "to" | "type":
            target = op.argument(1, "dtype")
            dtype = dtype_of(target)
            return base.but(dtype=dtype or base.dtype, graph=base.graph and base.kind != "mask") if target is not None else base
        case "full" | "full_like" | "new_full":
            value = values.of(op.argument(1 if op.name != "new_full" else 2, "fill_value"), scope)
            return Fact("full", value.low, value.high, TORCH, masked=value.low == value.high == -inf, graph=False)
        case "tensor" | "as_tensor" | "scalar_tensor":
            return base.but(owner=TORCH, graph=False, number=None, kind="tensor" if base.kind != "number" else "constant-tensor")
        case "Parameter":
            return Fact("weight", owner=TORCH)
        case "scatter_add" | "index_add" | "scatter" | "scatter_sum":
            source = values.of(op.operands[-1] if op.name != "scatter_sum" else op.operand, scope)
            return Fact("scattered-sum", 0.0 if source.low >= 0 and base.low >= 0 else -inf, inf, TORCH, graph=source.graph or base.graph)
        case "bincount" if op.argument(1, "weights") is not None:
            return Fact("scattered-sum", -inf, inf, TORCH)
        case "matmul" | "einsum":
            parts = [values.of(x, scope) for x in op.operands if not isinstance(x, ast.Constant)]
            if parts and all(p.kind == "unit" for p in parts):
                return Fact("cosine", -1.001, 1.001, TORCH, dtype=base.dtype, graph=any(p.graph for p in parts))  # rounding takes it past 1
            return Fact("matmul", 0.0 if parts and all(p.low >= 0 for p in parts) else -inf, inf, TORCH, dtype=base.dtype, graph=any(p.graph for p in parts))
        case "item" | "tolist":
            return base.but(owner=OTHER, graph=False)
        case "nan_to_num":
            return base.but(eased=True)
        case _:
            return None


def _trained(op: Operation, base: Fact) -> bool:
    """zeros(n, requires_grad=True), ones(n).requires_grad_(): where it starts says nothing of where training takes it."""
    if op.name == "requires_grad":
        return base.kind in ("zeros", "ones", "full")
    return op.name in ("zeros", "ones", "full", "zeros_like", "ones_like", "full_like") and "requires_grad" in op.keywords


def _is_dimension(values: Values, node: ast.expr, scope: Scope) -> bool:
    """Whether the second argument of max is a dimension, not a second tensor."""
    fact = values.of(node, scope)
    counted = fact.kind in ("number", "argument", "size", "loop", "integer", "none")
    return fact.owner != TORCH and (counted or re.search("dim|axis", ast.unparse(node)) is not None)


def _larger(name: str, base: Fact, other: Fact) -> Fact:
    """max(x, y) of two tensors; where nothing is known of the second, it is a floor that the author chose."""
    made = extreme(name, [base, other])
    return made.but(owner=TORCH, eased=made.eased or (name == "max" and other.low == -inf and other.owner != TORCH))


def _arithmetic(values: Values, op: Operation, base: Fact, scope: Scope) -> Fact:
    second = op.argument(1, "other")
    other = values.of(second, scope)
    if op.name == "add":
        return facts.add(base, other)
    if op.name == "sub":
        return facts.subtract(base, other, second is not None and op.operand is not None and values.same_root(op.operand, second, scope))
    if op.name == "mul":
        return facts.square(base) if same(op.operand, second) else facts.multiply(base, other)
    return facts.divide(base, other)


def _clamped(values: Values, op: Operation, base: Fact, scope: Scope) -> Fact:
    low_node = op.argument(1, "min") if op.name != "clamp_max" else None
    high_node = op.argument(2, "max") if op.name == "clamp" else op.argument(1, "max") if op.name == "clamp_max" else None
    low = values.of(low_node, scope).low if low_node is not None else -inf
    high = values.of(high_node, scope).high if high_node is not None else inf
    unknown = low_node is not None and low == -inf and not (isinstance(low_node, ast.Constant) and low_node.value is None)
    return base.but(
        low=max(base.low, low),
        high=max(min(base.high, high), low),
        kind=base.kind if low <= 0 else "bounded",
        eased=base.eased or unknown,
        node=op.call,
        positive=base.positive or low > 0,
    )
