"""Half precision: guards that round away, results past 65504, optimizers whose eps is 0."""

from __future__ import annotations

import ast
import re
from itertools import pairwise

from whynan.lint.aftermath import assigned
from whynan.lint.calls import Operation, names_in, operation
from whynan.lint.facts import OTHER, TORCH, Fact
from whynan.lint.model import Function
from whynan.lint.rules.registry import on_binary, on_call, on_function
from whynan.lint.spot import HIGH, LOW, MEDIUM, Spot

_HALF_TINY = 6e-8  # the smallest float16 above 0; half of it rounds to 0
_BFLOAT_STEP = 3.9e-3
_TO_HALF = re.compile(r"\.half\(\)|torch\.float16|torch\.half\b")


@on_binary(ast.Add)
def added(spot: Spot, node: ast.BinOp) -> None:
    """Look at x + eps."""
    for small, other in ((node.right, node.left), (node.left, node.right)):
        fact = spot.of(small)
        if fact.number is None or not 0 < fact.number < 1e-7 or isinstance(other, ast.Constant):
            continue
        _lost(spot, spot.of(other), fact.number)
        return


def _lost(spot: Spot, other: Fact, eps: float) -> None:
    dtype = other.dtype or spot.frame.half
    if dtype == "float16" and eps < _HALF_TINY / 2:
        words = ("eps that is 0 in float16", f"the smallest float16 is 6e-8: {eps:g} rounds to 0 and guards nothing", "use 1e-4, or compute this in float32")
        spot.report("WN204", *words, HIGH if other.dtype == "float16" else MEDIUM)
    elif 0 < eps < 1e-30 and other.owner == TORCH:
        words = ("eps too small to guard", f"{eps:g} is 0 in float16 and its inverse overflows float32", "use an eps of ordinary size: 1e-6")
        spot.report("WN204", *words, MEDIUM)
    elif other.owner == TORCH and other.kind in ("norm", "std", "sum", "mask-sum", "softmax") and _half_file(spot) and eps < _HALF_TINY / 2:
        words = ("eps that is 0 in float16", f"the file works in float16, where {eps:g} rounds to 0", "use 1e-4, or compute this in float32")
        spot.report("WN204", *words, LOW)
    elif eps <= 1e-15 and other.owner == TORCH:
        words = ("eps too small to guard", f"the quotient can reach {1 / eps:.0e}; in float16 the eps is 0", "use an eps of ordinary size: 1e-6, in half 1e-4")
        spot.report("WN204", *words, LOW)


_MINDS_ONE = re.compile(r"acosh?\b|asin\b|atanh|erfinv|arccos|arcsin|arctanh|logit\(|icdf|binary_cross|BCE|log1p\(\s*-")  # what an exact 1 does harm to


def _half_file(spot: Spot) -> bool:
    return _TO_HALF.search(spot.module.text) is not None


@on_call("clamp", "clamp_max", "clip")
def near_one(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at clamp(eps, 1 - eps) where 1 - eps is 1."""
    if op is None:
        return
    high = op.argument(2, "max") if op.name == "clamp" else op.argument(1, "max")
    value = spot.of(high).number
    fact = spot.of(op.operand)
    if high is None or value is None or fact.owner == OTHER or fact.kind == "uniform":  # rand is below 1
        return
    dtype = fact.dtype or spot.frame.half
    step = {"float16": 4.8e-4, "bfloat16": _BFLOAT_STEP, "float64": 1.1e-16}.get(dtype, 5.9e-8)
    if 0 < 1 - value < step / 2:
        words = (
            "1 - eps that rounds to 1",
            f"in {dtype or 'float32'} {value!r} is 1: the clamp lets exactly 1 through",
            "use an eps of at least 1e-6, in half 1e-3",
        )
        sure = MEDIUM if _minds_one(spot, op.operand) else LOW  # in an independent draw exactly 1 did harm in 2 of 8
        spot.report("WN204", *words, spot.sure(sure, TORCH if op.sure or op.name.startswith("clamp") else fact.owner))


def _minds_one(spot: Spot, operand: ast.expr | None) -> bool:
    """Whether something after the clamp does not bear exactly 1: an inverse function, or what 1 - x is handed to."""
    if any(isinstance(o, ast.BinOp) and isinstance(o.op, ast.Sub) and spot.of(o.left).number == 1 for o in spot.above()):
        return True
    names = "|".join(re.escape(n) for n in sorted(assigned(spot.statement) or (names_in(operand) if operand is not None else set())))
    return _MINDS_ONE.search(spot.function_text) is not None or re.search(rf"\b1(?:\.0*)?\s*-\s*(?:{names})\b", spot.function_text) is not None


@on_binary(ast.Sub)
def one_minus(spot: Spot, node: ast.BinOp) -> None:
    """Look at 1 - x + 1e-8 and at 1 - 1e-8 times a tensor; the clamp has a rule of its own."""
    if isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Add):
        inner = node.left
        one, small = spot.of(inner.left).number, spot.of(inner.right).number
        if one == 1 and small is not None and 0 < small < 5.9e-8 and spot.of(node.right).owner == TORCH:
            words = ("1 + eps that rounds to 1", f"in float32 1 + {small:g} is 1: nothing is guarded", "write (1 - x) + eps")
            named = not isinstance(inner.left, ast.Constant) or not isinstance(inner.right, ast.Constant)
            spot.report("WN204", *words, (HIGH if _under_a_pole(spot) else MEDIUM) if named else LOW)


def _under_a_pole(spot: Spot) -> bool:
    """Whether the value goes straight into a logarithm, a root or a denominator, which do not bear the 0 that is left."""
    for inner, outer in pairwise([spot.node, *spot.above()]):
        if isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Div) and outer.right is inner:
            return True
        if isinstance(outer, ast.Call) and isinstance(outer.func, ast.Attribute) and outer.func.attr in ("log", "log2", "sqrt", "rsqrt", "reciprocal", "pow"):
            return True
    return False


@on_binary(ast.MatMult)
def half_product(spot: Spot, node: ast.BinOp) -> None:
    """Look at products of attention scores before they are scaled, in half precision."""
    if not _half_file(spot) or spot.of(node.left).owner == OTHER:
        return
    transposed = (
        isinstance(node.right, ast.Call) and isinstance(node.right.func, ast.Attribute) and node.right.func.attr in ("transpose", "t", "permute")
    ) or isinstance(node.right, ast.Attribute)
    if transposed and spot.of(node.left).kind not in ("unit", "quotient"):
        words = (
            "scores scaled after the product, in float16",
            "q @ k passes 65504 where both are large: inf",
            "divide q by sqrt(d) before the product, or use bfloat16",
        )
        spot.report("WN202", *words, LOW)


@on_call("half", "to")
def cast(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at casts of values to float16."""
    if op is None or op.operand is None:
        return
    if op.name == "to" and spot.of(node).dtype != "float16":
        return
    fact = spot.of(op.operand)
    if fact.kind in ("module", "mask") or fact.owner == OTHER or (fact.low > -6e4 and fact.high < 6e4) or (op.name == "half" and fact.owner != TORCH):
        return
    words = ("cast to float16 of an unbounded value", "values past 65504 become inf", "use bfloat16, or scale before the cast")
    spot.report("WN202", *words, LOW)


@on_call("square", "pow")
def half_square(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at squares in float16: 256 squared is past its range."""
    if op is None or op.operand is None:
        return
    fact = spot.of(op.operand)
    if (fact.dtype == "float16" or (_half_file(spot) and fact.dtype == "" and fact.kind in ("difference",))) and fact.high > 255 and fact.owner != OTHER:
        words = ("square in float16", "256 * 256 passes 65504: inf", "cast to float32 before squaring")
        spot.report("WN202", *words, MEDIUM if fact.dtype == "float16" else LOW)


@on_function(r"\b(?:Adam|AdamW|Adagrad|RMSprop|NAdam|RAdam|SGD)\(")
def half_optimizer(spot: Spot, function: Function | ast.Module) -> None:
    """Look at Adam over parameters that were cast to float16."""
    if not _TO_HALF.search(spot.module.text):
        return
    body = (
        [n for s in function.body for n in ast.walk(s)]
        if not isinstance(function, ast.Module)
        else [n for s in function.body if not isinstance(s, ast.FunctionDef | ast.ClassDef) for n in ast.walk(s)]
    )
    halved = _halved_models(spot, body)
    for node in body:
        op = operation(spot.module, node) if isinstance(node, ast.Call) else None
        if op is None or op.name not in ("Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "SGD") or not op.operands:
            continue
        base = ast.unparse(op.operands[0]).partition(".parameters")[0].strip("*[( ")
        if base in halved:
            adam = op.name != "SGD"
            label = "in float16 Adam's eps of 1e-8 is 0 and the second moment underflows: 0 / 0" if adam else "momentum sums float16 gradients past 65504"
            words = ("optimizer over float16 parameters", label, "keep float32 parameters and use autocast, or give eps=1e-4")
            if not adam and "momentum" not in op.keywords:
                continue
            eps = spot.of(op.keywords.get("eps")).number if "eps" in op.keywords else 0.0
            if adam and eps and eps > _HALF_TINY:
                continue
            spot.report("WN604", *words, HIGH if adam else LOW, node=node, origin=_step_of(spot, node), origin_label="the update happens here")  # type: ignore[arg-type]


def _halved_models(spot: Spot, body: list[ast.AST]) -> set[str]:
    names: set[str] = set()
    for node in body:
        value = node.value if isinstance(node, ast.Assign | ast.Expr) else None
        if not isinstance(value, ast.Call):
            continue
        if isinstance(node, ast.Assign) and (_casts(value) or _returns_half(spot, value)):
            names |= {ast.unparse(t) for t in node.targets}
        elif isinstance(node, ast.Expr) and isinstance(value.func, ast.Attribute) and _casts(value):
            names.add(ast.unparse(value.func.value))
    return names


def _casts(node: ast.expr) -> bool:
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "half" or (
            node.func.attr == "to"
            and any("float16" in ast.unparse(a) and "bfloat16" not in ast.unparse(a) for a in [*node.args, *(k.value for k in node.keywords)])
        ):
            return True
        node = node.func.value
    return False


def _returns_half(spot: Spot, node: ast.Call) -> bool:
    if not isinstance(node.func, ast.Name) or node.func.id not in spot.module.functions:
        return False
    return any(isinstance(n, ast.Return) and n.value is not None and _casts(n.value) for n in ast.walk(spot.module.functions[node.func.id]))


def _step_of(spot: Spot, made: ast.AST) -> ast.AST | None:
    for node in ast.walk(spot.module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step" and "opt" in ast.unparse(node.func.value).lower():
            return node
    return None
