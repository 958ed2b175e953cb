"""Powers and products of probabilities, rewritten on their logarithms: `log(((p * q) ** b / r).sum(-1))` is a logsumexp.

A softmax underflows to an exact 0, where a power below 1 has an infinite slope. Its logarithm does not underflow. The same walk
is made over the source, for the diff, and over the calls remembered in a replay, for the proof.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass, field
from typing import Any

from whynan.causes.edits import as_operand
from whynan.causes.made import PICKS, Made, maker
from whynan.causes.source import Expression

_DEPTH = 8


def around(expression: Expression, kind: str) -> tuple[ast.AST, str] | None:
    """Return the node to replace and its text: the logarithm around a power, or the power alone."""
    if kind == "powers by hand":
        text = _Text(expression).of(expression.node, _DEPTH)
        return None if text is None or "soft" not in text else (expression.node, f"torch.exp({text})")
    for node in expression.parents():
        if isinstance(node, ast.Call) and expression.parts(node)[0] == "log" and len(expression.parts(node)[1]) == 1:
            text = _Text(expression).of(expression.parts(node)[1][0], _DEPTH)
            return None if text is None or "soft" not in text else (node, text)
    return None


def of_exponents(expression: Expression, count: int) -> tuple[Any, ...] | None:
    """Return the logarithm at a place and the same from the exponents in it; nothing where the text has not as many as the replay."""
    if expression.name != "log" or len(expression.nodes) != 1 or not _holds_exponential(expression, expression.nodes[0], _DEPTH):
        return None
    logarithm = _Text(expression)
    text = logarithm.of(expression.nodes[0], _DEPTH)
    return None if text is None or len(logarithm.exponents) != count else (expression.node, text, *logarithm.kept)


def of_one(expression: Expression) -> tuple[ast.AST, str] | None:
    """Return log1p(exp(x)), log(1 + exp(x)) or log(sum(exp(x))) at a place, and the same in one call; parts of it may have names."""
    if len(expression.nodes) != 1:
        return None
    inside = _given(expression, expression.nodes[0])
    if expression.name == "log1p":
        exponent = _exponent(expression, inside)
        return None if exponent is None else (expression.node, f"torch.nn.functional.softplus({expression.segment(exponent)})")
    if isinstance(inside, ast.BinOp) and isinstance(inside.op, ast.Add):
        one = [side for side in (inside.left, inside.right) if isinstance(side, ast.Constant) and side.value == 1]
        found = [e for side in (inside.left, inside.right) if (e := _exponent(expression, _given(expression, side))) is not None]
        return (expression.node, f"torch.nn.functional.softplus({expression.segment(found[0])})") if one and found else None
    if not isinstance(inside, ast.Call) or expression.parts(inside)[0] not in ("sum", "mean") or not expression.parts(inside)[1]:
        return None
    exponent = _exponent(expression, _given(expression, expression.parts(inside)[1][0]))
    text = None if exponent is None else total_text(expression, inside, exponent)
    return None if text is None else (expression.node, text)


def _given(expression: Expression, node: ast.expr) -> ast.expr | None:
    """Return what a name was given, if it may be computed once more; other expressions as they are."""
    if not isinstance(node, ast.Name):
        return node
    given = expression.assigned(node.id)
    if isinstance(given, ast.Name):
        return _given(expression, given)
    return given if given is not None and all(expression.is_repeatable(part) for part in _innermost(expression, given)) else None


def _innermost(expression: Expression, node: ast.expr) -> list[ast.expr]:
    """Return what an exponential is of, however many reductions are around it: it alone is computed once more."""
    name, operands = expression.parts(node) if isinstance(node, ast.Call) else ("", [])
    return _innermost(expression, operands[0]) if name in ("exp", "sum", "mean") and operands else [node]


def _exponent(expression: Expression, node: ast.expr | None) -> ast.expr | None:
    name, operands = expression.parts(node) if isinstance(node, ast.Call) else ("", [])
    return operands[0] if name == "exp" and len(operands) == 1 else None


def _holds_exponential(expression: Expression, node: ast.AST, depth: int) -> bool:
    """Whether there is an exponential in an expression, or in what its names were given."""
    if depth == 0:
        return False
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    given = [expression.assigned(n.id) for n in ast.walk(node) if isinstance(n, ast.Name)]
    return any(expression.parts(c)[0] == "exp" for c in calls) or any(_holds_exponential(expression, g, depth - 1) for g in given if g is not None)


@dataclass(slots=True)
class _Text:
    """The source of a logarithm, as far as it is written."""

    expression: Expression
    exponents: list[str] = field(default_factory=list)  # in it: as many as were played, or it says something else
    kept: list[tuple[ast.AST, str]] = field(default_factory=list)  # those that may not be computed once more: they are given a name where they are

    def of(self, node: ast.AST, depth: int) -> str | None:
        """Return the source of the logarithm of an expression."""
        if depth == 0:
            return None
        given = self.expression.assigned(node.id) if isinstance(node, ast.Name) else None
        if given is not None and (_is_soft(self.expression, given) or _holds_exponential(self.expression, given, depth)):
            if not _repeatable_around_exponents(self.expression, given):
                return None
            node = given
        if isinstance(node, ast.BinOp):
            return self._operator(node, depth)
        name, operands = self.expression.parts(node) if isinstance(node, ast.Call) else ("", [])
        if isinstance(node, ast.Call) and operands:
            if name == "softmax":
                return f"torch.log_softmax({_arguments(self.expression, operands, node)})"
            if name == "exp" and len(operands) == 1:
                self.exponents.append(self._exponent(operands[0], node))
                return self.exponents[-1]
            if name == "sigmoid":
                return f"torch.nn.functional.logsigmoid({self.expression.segment(operands[0])})"
            if name == "sum":
                inner = self.of(operands[0], depth - 1)
                rest = _arguments(self.expression, operands[1:], node)
                return None if inner is None or not rest else f"torch.logsumexp({inner}, {rest})"
            if name == "pow" and len(operands) == 2:
                return self._power(operands[0], operands[1], depth)
        if isinstance(node, ast.Constant) or _holds_exponential(self.expression, node, depth):
            return None
        return _plain_log(self.expression, node)

    def _exponent(self, exponent: ast.expr, call: ast.Call) -> str:
        """Return what an exponential is of; by a name, where it stands in another statement and may not be computed once more."""
        text = self.expression.segment(exponent)
        here = any(part is exponent for part in ast.walk(self.expression.node))
        if here or self.expression.is_repeatable(exponent):
            return as_operand(text)
        name = self.expression.free_name("exponent" if not self.kept else f"exponent_of_{len(self.kept) + 1}")
        self.kept.append((exponent, f"{name} := {text}" if exponent in call.args else f"({name} := {text})"))
        return name

    def _operator(self, node: ast.BinOp, depth: int) -> str | None:
        if isinstance(node.op, ast.Pow):
            return self._power(node.left, node.right, depth)
        signs: dict[type[ast.operator], str] = {ast.Mult: "+", ast.Div: "-"}
        sign = signs.get(type(node.op))
        parts = [self.of(side, depth - 1) for side in (node.left, node.right)]
        if sign is None and _holds_exponential(self.expression, node, depth):
            return None if not isinstance(node.op, ast.Add) or None in parts else f"torch.logaddexp({parts[0]}, {parts[1]})"
        if sign is None or parts[0] is None or parts[1] is None:
            return None if sign is not None else _plain_log(self.expression, node)
        right = as_operand(parts[1]) if sign == "-" else parts[1]
        return f"{parts[0]} {sign} {right}"

    def _power(self, base: ast.AST, exponent: ast.AST, depth: int) -> str | None:
        inner = self.of(base, depth - 1)
        return None if inner is None else f"{as_operand(self.expression.segment(exponent))} * {as_operand(inner)}"


def _repeatable_around_exponents(expression: Expression, node: ast.AST) -> bool:
    """Whether an expression may be computed once more, apart from what is in its exponentials: these can be given names."""
    if isinstance(node, ast.BinOp):
        return all(_repeatable_around_exponents(expression, side) for side in (node.left, node.right))
    name, operands = expression.parts(node) if isinstance(node, ast.Call) else ("", [])
    if name == "sum" and operands:
        return all(_repeatable_around_exponents(expression, operand) for operand in operands)
    return (name == "exp" and len(operands) == 1) or expression.is_repeatable(node)


def _plain_log(expression: Expression, node: ast.AST) -> str:
    """Return the logarithm of what holds no exponential: an attribute may be a number, and so may be what is computed of one."""
    text = expression.segment(node)
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node]
    held = all(isinstance(part, ast.Attribute | ast.Constant) for part in parts)
    return f"torch.as_tensor({text}).log()" if held else f"torch.log({text})"


def _is_soft(expression: Expression, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and expression.parts(node)[0] in ("softmax", "sigmoid")


def _arguments(expression: Expression, operands: list[ast.expr], node: ast.Call) -> str:
    return ", ".join([*map(expression.segment, operands), *(f"{k.arg}={expression.segment(k.value)}" for k in node.keywords)])


def swapped(func: Any, args: tuple[Any, ...], kind: str) -> Any:
    """Return the same from the calls that a replay remembers."""
    import torch

    name = getattr(func, "__name__", "").strip("_")
    if kind == "powers by hand":
        base = _log(args[0], _DEPTH, []) if name == "pow" else None
        return NotImplemented if base is None else torch.exp(args[1] * base)
    inner = _log(args[0], _DEPTH, []) if name == "log" else None
    return NotImplemented if inner is None else inner


def from_exponents(value: Any, exponents: list[Any]) -> Any:
    """Return the logarithm of a quotient, product or sum with exponentials in it, from the exponents, which are noted; None where there is no exponential."""
    return _log(value, _DEPTH, exponents) if _has_exponential(value, _DEPTH) else None


def _has_exponential(value: Any, depth: int) -> bool:
    made = maker(value) if depth else None
    if made is None or made.name not in (*_FOLLOWED, *PICKS, "exp"):
        return False
    return made.name == "exp" or any(_has_exponential(arg, depth - 1) for arg in made.args[:2])


_FOLLOWED = ("mul", "rmul", "div", "truediv", "add", "radd", "sum", "prod", "pow", "exp")


def _log(value: Any, depth: int, exponents: list[Any]) -> Any:
    """Return the logarithm of a value, from what it was made of."""
    import torch

    if not isinstance(value, torch.Tensor):
        return math.log(value) if isinstance(value, int | float) and value > 0 else None
    made = maker(value) if depth else None
    if made is None:
        return value.log()
    name, args = made.name, made.args
    if name in ("softmax", "sigmoid"):
        return log_of(made)
    if name == "exp":
        exponents.append(args[0])
        return args[0]
    if name in PICKS and _has_exponential(args[0], depth - 1):
        inner = _log(args[0], depth - 1, exponents)
        return None if inner is None else made.func(inner, *args[1:], **made.kwargs)
    if name == "sum":
        inner = _log(args[0], depth - 1, exponents)
        return None if made.dim is None or inner is None else torch.logsumexp(inner, made.dim, keepdim=made.keepdim)
    if name == "prod":
        inner = _log(args[0], depth - 1, exponents)
        return None if made.dim is None or inner is None else torch.sum(inner, made.dim, keepdim=made.keepdim)
    if name == "pow":
        inner = _log(args[0], depth - 1, exponents)
        return None if inner is None else args[1] * inner
    if name in ("add", "radd") and _has_exponential(value, depth):
        left, right = (_log(a, depth - 1, exponents) for a in args[:2])
        return None if left is None or right is None else torch.logaddexp(*map(torch.as_tensor, (left, right)))
    if name in ("mul", "rmul", "div", "truediv"):
        left, right = (_log(a, depth - 1, exponents) for a in args[:2])
        return None if left is None or right is None else left + right if "mul" in name else left - right
    return value.log()


def log_of(made: Made) -> Any:
    """Return the logarithm of a softmax or a sigmoid, straight from its argument."""
    import torch

    if made.name == "softmax":
        return torch.log_softmax(*made.args[:2], **{k: v for k, v in made.kwargs.items() if k in ("dim", "dtype")})
    return torch.nn.functional.logsigmoid(made.args[0])


def log_of_total(total: Made, exponent: Any) -> Any:
    """Return the logarithm of a sum or a mean of exponentials, from the exponents."""
    import torch

    dims = tuple(range(exponent.dim())) if total.dim is None else total.dim
    summed = torch.logsumexp(exponent, dim=dims, keepdim=total.keepdim)
    return summed if total.name == "sum" else summed - math.log(max(exponent.numel() // max(summed.numel(), 1), 1))


def total_text(expression: Expression, total: ast.Call, exponent: ast.expr) -> str | None:
    """Return the source of the same."""
    name, operands = expression.parts(total)
    dim = operands[1] if len(operands) > 1 else next((k.value for k in total.keywords if k.arg in ("dim", "axis")), None)
    kept = operands[2] if len(operands) > 2 else next((k.value for k in total.keywords if k.arg == "keepdim"), None)
    first = again = expression.segment(exponent)
    if name == "mean" and not expression.is_repeatable(exponent):
        again = expression.free_name("exponent")
        first = f"({again} := {first})"
    whole = f"torch.logsumexp({as_operand(first)}.flatten(), dim=0)" if dim is None else ""
    over = whole or f"torch.logsumexp({first}, dim={expression.segment(dim)}{f', keepdim={expression.segment(kept)}' if kept is not None else ''})"  # type: ignore[arg-type]
    if name == "sum":
        return over
    size = f"{as_operand(again)}.numel()" if dim is None else f"{as_operand(again)}.shape[{expression.segment(dim)}]"
    known = dim is None or isinstance(dim, ast.Constant | ast.UnaryOp)  # a name may stand for several dimensions, which have no one size
    return f"{over} - torch.tensor({size}).log()" if known else None
