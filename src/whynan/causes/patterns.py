"""Two calls that belong together: log of a softmax, log of a sigmoid, the root of a sum of squares.

In the source the inner call stands in the expression itself or in the one assignment of its name; in a replay its
arguments are remembered by the tensor it returned.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from whynan.causes import logspace
from whynan.causes.made import maker
from whynan.causes.source import Expression, call_parts

_POWERS = ("log of powers by hand", "powers by hand")
OUTER = ("softmax by hand", "sigmoid by hand", "logsumexp by hand", "softplus by hand", "logcosh by hand", "tanh by hand", "cross-entropy by hand", *_POWERS)


def inner_swap(kind: str, name: str, plain_name: Callable[[Any], str]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Return the joint computation for a replay."""
    import torch

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plain_name(func) != name or not args:
            return NotImplemented
        if kind == "sumsq":
            return _norm(torch, args[0])
        made = maker(args[0], kind)
        return NotImplemented if made is None else logspace.log_of(made)

    return change


def _norm(torch: Any, value: Any) -> Any:
    summed = maker(value, "sum")
    squared = maker(summed.args[0], "pow", "square", "mul") if summed is not None else None
    if summed is None or squared is None:
        return NotImplemented
    base, *rest = squared.args
    if rest and rest[0] != 2 and rest[0] is not base:
        return NotImplemented
    return torch.linalg.vector_norm(base, dim=summed.dim, keepdim=summed.keepdim)


def inner_text(expression: Expression, kind: str) -> str | None:
    """Return the source text of the joint call's arguments."""
    node = _call(expression, expression.nodes[0] if expression.nodes else None)
    if node is None:
        return None
    name, operands = call_parts(node)
    if kind == "sumsq":
        return _norm_text(expression, name, operands, node)
    if name.lower() != kind:
        return None
    rest = [expression.segment(o) for o in operands] + [f"{k.arg}={expression.segment(k.value)}" for k in node.keywords]
    return ", ".join(rest)


def _call(expression: Expression, node: ast.expr | None) -> ast.Call | None:
    if isinstance(node, ast.Name):
        node = expression.assigned(node.id)
    return node if isinstance(node, ast.Call) else None


def _norm_text(expression: Expression, name: str, operands: list[ast.expr], node: ast.Call) -> str | None:
    if name != "sum" or not operands:
        return None
    base = _squared(expression, operands[0])
    if base is None:
        return None
    arguments = [expression.segment(base)]
    if len(operands) > 1:
        arguments.append(f"dim={expression.segment(operands[1])}")
    arguments += [f"{k.arg}={expression.segment(k.value)}" for k in node.keywords]
    return ", ".join(arguments)


def _squared(expression: Expression, node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.Name):
        assigned = expression.assigned(node.id)
        if assigned is None:
            return None
        node = assigned
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and isinstance(node.right, ast.Constant) and node.right.value == 2:
        return node.left
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and ast.dump(node.left) == ast.dump(node.right):
        return node.left
    if isinstance(node, ast.Call):
        name, operands = call_parts(node)
        if name == "square" and operands:
            return operands[0]
        if name == "pow" and len(operands) == 2 and isinstance(operands[1], ast.Constant) and operands[1].value == 2:
            return operands[0]
    return None


def around(expression: Expression, kind: str) -> tuple[ast.AST, str] | None:
    """Return the expression around an exponential that writes `kind` by hand, and the text to put in its place."""
    if not expression.operands:
        return None
    if kind in _POWERS:
        return logspace.around(expression, kind)
    argument = expression.nodes[0]
    text = expression.segment(argument)
    same = ast.dump(argument)
    for node in expression.parents()[:5]:
        if kind in _WHOLE and (found := _WHOLE[kind](expression, node)) is not None:
            return node, found
        if kind == "softmax by hand" and _is_div(node) and _is_exp(node.left, same):  # type: ignore[attr-defined]
            total = node.right  # type: ignore[attr-defined]
            if isinstance(total, ast.Call) and call_parts(total)[0] == "sum" and _is_exp(call_parts(total)[1][0], same):
                dim = _dim_text(expression, total)
                return (node, f"torch.softmax({text}, dim={dim})") if dim is not None else None
        if kind == "sigmoid by hand" and _is_div(node) and _is_exp(node.left, same) and _one_plus(node.right, same):  # type: ignore[attr-defined]
            return node, f"torch.sigmoid({text})"
        if kind == "logsumexp by hand" and isinstance(node, ast.Call) and call_parts(node)[0] == "log" and call_parts(node)[1]:
            total = call_parts(node)[1][0]
            if isinstance(total, ast.Call) and call_parts(total)[0] == "sum" and _is_exp(call_parts(total)[1][0], same):
                dim = _dim_text(expression, total)
                return (node, f"torch.logsumexp({text}, dim={dim})") if dim is not None else None
        if kind == "softplus by hand" and isinstance(node, ast.Call):
            name, operands = call_parts(node)
            if (name == "log" and operands and _one_plus(operands[0], same)) or (name == "log1p" and operands and _is_exp(operands[0], same)):
                return node, f"torch.nn.functional.softplus({text})"
        if kind == "logcosh by hand" and isinstance(node, ast.Call) and call_parts(node)[0] == "log":
            return node, f"(({text}).abs() + torch.nn.functional.softplus(-2 * ({text}).abs()) - 0.6931471805599453)"
    return None


def _tanh_text(expression: Expression, node: ast.AST) -> str | None:
    """Read (exp(a) - exp(-a)) / (exp(a) + exp(-a))."""
    if not _is_div(node):
        return None
    above, below = node.left, node.right  # type: ignore[attr-defined]
    if not (isinstance(above, ast.BinOp) and isinstance(above.op, ast.Sub) and isinstance(below, ast.BinOp) and isinstance(below.op, ast.Add)):
        return None
    first = call_parts(above.left)[1] if isinstance(above.left, ast.Call) else []
    if not first:
        return None
    plus, minus = ast.dump(first[0]), ast.dump(ast.UnaryOp(ast.USub(), first[0]))
    pairs = ((above.left, above.right), (below.left, below.right), (below.right, below.left))
    fits = [_is_exp(a, plus) and _is_exp(b, minus) for a, b in pairs]
    return f"torch.tanh({expression.segment(first[0])})" if fits[0] and (fits[1] or fits[2]) else None


def _entropy_text(expression: Expression, node: ast.AST) -> str | None:
    """Read y * log(p) + (1 - y) * log(1 - p), in whatever order."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        return None
    terms = [_weighted_log(node.left), _weighted_log(node.right)]
    for first, second in (terms, terms[::-1]):
        if first is None or second is None:
            continue
        if _is_rest(second[0], first[0]) and _is_rest(second[1], first[1]):
            return f'-torch.nn.functional.binary_cross_entropy({expression.segment(first[1])}, {expression.segment(first[0])}, reduction="none")'
    return None


def _weighted_log(node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return weight and argument of `weight * log(argument)`."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return None
    for weight, log in ((node.left, node.right), (node.right, node.left)):
        if isinstance(log, ast.Call) and call_parts(log)[0] == "log" and len(call_parts(log)[1]) == 1:
            return weight, call_parts(log)[1][0]
    return None


def _is_rest(node: ast.expr, of: ast.expr) -> bool:
    one = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Constant) and node.left.value == 1
    return one and ast.dump(node.right) == ast.dump(of)  # type: ignore[attr-defined]


_WHOLE: dict[str, Callable[[Expression, ast.AST], str | None]] = {"tanh by hand": _tanh_text, "cross-entropy by hand": _entropy_text}


def _is_div(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def _is_exp(node: ast.AST, same: str) -> bool:
    return isinstance(node, ast.Call) and call_parts(node)[0] == "exp" and bool(call_parts(node)[1]) and ast.dump(call_parts(node)[1][0]) == same


def _one_plus(node: ast.AST, same: str) -> bool:
    if isinstance(node, ast.Call) and call_parts(node)[0] == "add" and len(call_parts(node)[1]) == 2:
        left, right = call_parts(node)[1]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = node.left, node.right
    else:
        return False
    ones = [n for n in (left, right) if isinstance(n, ast.Constant) and n.value == 1]
    return len(ones) == 1 and any(_is_exp(n, same) for n in (left, right))


def _dim_text(expression: Expression, total: ast.Call) -> str | None:
    operands = call_parts(total)[1]
    if len(operands) > 1:
        return expression.segment(operands[1])
    return next((expression.segment(k.value) for k in total.keywords if k.arg in ("dim", "axis")), None)


def outer_swap(kind: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Return the joint computation, made from the argument the exponential was called with."""
    import torch

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind == "cross-entropy by hand":
            return _entropy(torch, args)
        if kind in _POWERS:
            return logspace.swapped(func, args, kind)
        value = _exponent(args[0], 3)
        if value is None:
            return NotImplemented
        if kind in ("softmax by hand", "logsumexp by hand"):
            summed = maker(args[1] if kind == "softmax by hand" else args[0], "sum")
            if summed is None:
                return NotImplemented
            return torch.softmax(value, dim=summed.dim) if kind == "softmax by hand" else torch.logsumexp(value, dim=summed.dim, keepdim=summed.keepdim)
        if kind in ("sigmoid by hand", "tanh by hand"):
            return torch.sigmoid(value) if kind == "sigmoid by hand" else torch.tanh(value)
        if kind == "softplus by hand":
            return torch.nn.functional.softplus(value)
        return value.abs() + torch.nn.functional.softplus(-2 * value.abs()) - 0.6931471805599453

    return change


def _entropy(torch: Any, args: tuple[Any, ...]) -> Any:
    """Make the cross-entropy of the two products that are added."""
    terms = [_factors_of(value) for value in args[:2]]
    for first, second in (terms, terms[::-1]):
        rest = maker(second[1], "rsub", "sub") if first is not None and second is not None else None
        if first is not None and rest is not None and any(a is first[1] for a in rest.args):
            return -torch.nn.functional.binary_cross_entropy(first[1], first[0], reduction="none")
    return NotImplemented


def _factors_of(value: Any) -> tuple[Any, Any] | None:
    """Return weight and argument of a product of a weight and a logarithm."""
    made = maker(value, "mul", "rmul")
    for index, factor in enumerate(made.args[:2] if made is not None else ()):
        log = maker(factor, "log")
        if made is not None and log is not None:
            return made.args[1 - index], log.args[0]
    return None


def _exponent(value: Any, depth: int) -> Any:
    found = maker(value) if depth else None
    if found is None:
        return None
    if found.name in ("exp", "cosh"):
        return found.args[0]
    return next((e for e in (_exponent(a, depth - 1) for a in found.args) if e is not None), None)
