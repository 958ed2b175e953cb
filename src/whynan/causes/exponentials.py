"""What people write out with exponentials: softmax, sigmoid, tanh, logsumexp, softplus, a cross-entropy; torch has each in one call that cannot overflow.

The same is read in the source, for the diff, and from the calls remembered in a replay, for the proof.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from whynan.causes import logspace
from whynan.causes.made import maker
from whynan.causes.patterns import taken_from_one
from whynan.causes.source import Expression

_POWERS = ("log of powers by hand", "powers by hand")
KINDS = (
    "softmax by hand",
    "sigmoid by hand",
    "logsumexp by hand",
    "softplus by hand",
    "logcosh by hand",
    "tanh by hand",
    "cross-entropy by hand",
    "log1mexp by hand",
    *_POWERS,
)


def around(expression: Expression, kind: str) -> tuple[ast.AST, str] | None:
    """Return the expression around an exponential that writes `kind` by hand, and the text to put in its place, empty where none can be given.

    A logarithm or a quotient of exponentials may be that expression itself; the exponentials may then have names.
    """
    if not expression.operands:
        return None
    if kind in _POWERS:
        return logspace.around(expression, kind)
    if kind in _OF_EXPONENTIALS and expression.name in ("log", "log1p", "div"):
        written = _OF_EXPONENTIALS[kind](expression) if not isinstance(expression.node, ast.AugAssign) else None
        return None if written is None else (expression.node, written)
    argument = expression.nodes[0]
    text = expression.segment(argument)
    same = ast.dump(argument)
    for node in expression.parents()[:5]:
        if kind in _WHOLE and (found := _WHOLE[kind](expression, node)) is not None:
            return node, found
        if kind == "softmax by hand" and _is_div(node) and _is_exp(expression, node.left, same):  # type: ignore[attr-defined]
            total = node.right  # type: ignore[attr-defined]
            if isinstance(total, ast.Call) and expression.parts(total)[0] == "sum" and _is_exp(expression, expression.parts(total)[1][0], same):
                dim = _dim_text(expression, total)
                return (node, f"torch.softmax({text}, dim={dim})") if dim is not None else None
        if kind == "sigmoid by hand" and _is_div(node) and _is_exp(expression, node.left, same) and _one_plus(expression, node.right, same):  # type: ignore[attr-defined]
            return node, f"torch.sigmoid({text})"
        if kind == "logsumexp by hand" and isinstance(node, ast.Call) and expression.parts(node)[0] == "log" and expression.parts(node)[1]:
            total = expression.parts(node)[1][0]
            if isinstance(total, ast.Call) and expression.parts(total)[0] in ("sum", "mean") and _is_exp(expression, expression.parts(total)[1][0], same):
                written = logspace.total_text(expression, total, argument)
                return None if written is None else (node, written)
        if kind == "softplus by hand" and isinstance(node, ast.Call):
            name, operands = expression.parts(node)
            if (name == "log" and operands and _one_plus(expression, operands[0], same)) or (
                name == "log1p" and operands and _is_exp(expression, operands[0], same)
            ):
                return node, f"torch.nn.functional.softplus({text})"
        if kind == "logcosh by hand" and isinstance(node, ast.Call) and expression.parts(node)[0] == "log":
            if not expression.is_repeatable(argument):
                return node, ""
            return node, f"(({text}).abs() + torch.nn.functional.softplus(-2 * ({text}).abs()) - 0.6931471805599453)"
    return None


def _tanh_text(expression: Expression, node: ast.AST) -> str | None:
    """Read (exp(a) - exp(-a)) / (exp(a) + exp(-a))."""
    if not _is_div(node):
        return None
    above, below = node.left, node.right  # type: ignore[attr-defined]
    if not (isinstance(above, ast.BinOp) and isinstance(above.op, ast.Sub) and isinstance(below, ast.BinOp) and isinstance(below.op, ast.Add)):
        return None
    first = expression.parts(above.left)[1] if isinstance(above.left, ast.Call) else []
    if not first:
        return None
    plus, minus = ast.dump(first[0]), ast.dump(ast.UnaryOp(ast.USub(), first[0]))
    pairs = ((above.left, above.right), (below.left, below.right), (below.right, below.left))
    fits = [_is_exp(expression, a, plus) and _is_exp(expression, b, minus) for a, b in pairs]
    return f"torch.tanh({expression.segment(first[0])})" if fits[0] and (fits[1] or fits[2]) else None


def _entropy_text(expression: Expression, node: ast.AST) -> str | None:
    """Read y * log(p) + (1 - y) * log(1 - p), in whatever order."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        return None
    terms = [_weighted_log(expression, node.left), _weighted_log(expression, node.right)]
    for first, second in (terms, terms[::-1]):
        if first is None or second is None:
            continue
        if _is_rest(second[0], first[0]) and _is_rest(second[1], first[1]):
            return f'-torch.nn.functional.binary_cross_entropy({expression.segment(first[1])}, {expression.segment(first[0])}, reduction="none")'
    return None


def _weighted_log(expression: Expression, node: ast.expr) -> tuple[ast.expr, ast.expr] | None:
    """Return weight and argument of `weight * log(argument)`."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return None
    for weight, log in ((node.left, node.right), (node.right, node.left)):
        if isinstance(log, ast.Call) and expression.parts(log)[0] == "log" and len(expression.parts(log)[1]) == 1:
            return weight, expression.parts(log)[1][0]
    return None


def _is_rest(node: ast.expr, of: ast.expr) -> bool:
    one = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.left, ast.Constant) and node.left.value == 1
    return one and ast.dump(node.right) == ast.dump(of)  # type: ignore[attr-defined]


_WHOLE: dict[str, Callable[[Expression, ast.AST], str | None]] = {"tanh by hand": _tanh_text, "cross-entropy by hand": _entropy_text}


def _softmax_of(expression: Expression) -> str | None:
    """Read exp(a) / exp(a).sum(dim) at the quotient."""
    if expression.name != "div" or len(expression.nodes) != 2:
        return None
    exponent, (total, inside) = _exponent_of(expression, expression.nodes[0]), _summed(expression, expression.nodes[1])
    below = _exponent_of(expression, inside) if inside is not None else None
    if exponent is None or below is None or total is None or ast.dump(exponent) != ast.dump(below):
        return None
    dim = _dim_text(expression, total)
    return None if dim is None else f"torch.softmax({expression.segment(exponent)}, dim={dim})"


def _logsumexp_of(expression: Expression) -> str | None:
    """Read log(exp(a).sum(dim)), or of a mean, at the logarithm."""
    total, inside = _summed(expression, expression.nodes[0], ("sum", "mean")) if expression.name == "log" else (None, None)
    exponent = _exponent_of(expression, inside) if inside is not None else None
    return None if exponent is None or total is None else logspace.total_text(expression, total, exponent)


def _log1mexp_of(expression: Expression) -> str | None:
    """Read log(1 - exp(a)) or log1p(-exp(a)) at the logarithm."""
    given = _named(expression, expression.nodes[0])
    if expression.name == "log":
        taken = taken_from_one(expression, given)
    else:
        taken = given.operand if expression.name == "log1p" and isinstance(given, ast.UnaryOp) and isinstance(given.op, ast.USub) else None
    exponent = _exponent_of(expression, taken, given is expression.nodes[0]) if taken is not None else None
    return None if exponent is None else f"torch.log(-torch.expm1({expression.segment(exponent)}))"


_OF_EXPONENTIALS: dict[str, Callable[[Expression], str | None]] = {
    "softmax by hand": _softmax_of,
    "logsumexp by hand": _logsumexp_of,
    "log1mexp by hand": _log1mexp_of,
}


def _named(expression: Expression, node: ast.expr) -> ast.expr:
    """Return what a name was given, or the node itself."""
    given = expression.assigned(node.id) if isinstance(node, ast.Name) else None
    return node if given is None else given


def _summed(expression: Expression, node: ast.expr, names: tuple[str, ...] = ("sum",)) -> tuple[ast.Call | None, ast.expr | None]:
    """Return a sum, which may have a name, and what it adds up."""
    total = _named(expression, node)
    name, operands = expression.parts(total)
    return (total, operands[0]) if isinstance(total, ast.Call) and name in names and operands else (None, None)


def _exponent_of(expression: Expression, node: ast.expr, here: bool = True) -> ast.expr | None:
    """Return the argument of an exponential; one that was made on another line must be the same when it is written here."""
    given = _named(expression, node)
    name, operands = expression.parts(given)
    if name != "exp" or len(operands) != 1:
        return None
    return operands[0] if (here and given is node) or expression.is_repeatable(operands[0]) else None


def _is_div(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)


def _is_exp(expression: Expression, node: ast.AST, same: str) -> bool:
    return (
        isinstance(node, ast.Call) and expression.parts(node)[0] == "exp" and bool(expression.parts(node)[1]) and ast.dump(expression.parts(node)[1][0]) == same
    )


def _one_plus(expression: Expression, node: ast.AST, same: str) -> bool:
    if isinstance(node, ast.Call) and expression.parts(node)[0] == "add" and len(expression.parts(node)[1]) == 2:
        left, right = expression.parts(node)[1]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = node.left, node.right
    else:
        return False
    ones = [n for n in (left, right) if isinstance(n, ast.Constant) and n.value == 1]
    return len(ones) == 1 and any(_is_exp(expression, n, same) for n in (left, right))


def _dim_text(expression: Expression, total: ast.Call) -> str | None:
    operands = expression.parts(total)[1]
    if len(operands) > 1:
        return expression.segment(operands[1])
    return next((expression.segment(k.value) for k in total.keywords if k.arg in ("dim", "axis")), None)


def swap(kind: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
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
        if kind == "softmax by hand":
            summed = maker(args[1], "sum")
            return NotImplemented if summed is None else torch.softmax(value, dim=summed.dim)
        if kind == "logsumexp by hand":
            total = maker(args[0], "sum", "mean")
            return NotImplemented if total is None else logspace.log_of_total(total, value)
        if kind in ("sigmoid by hand", "tanh by hand"):
            return torch.sigmoid(value) if kind == "sigmoid by hand" else torch.tanh(value)
        if kind == "softplus by hand":
            return torch.nn.functional.softplus(value)
        if kind == "log1mexp by hand":
            return torch.log(-torch.expm1(value))
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
