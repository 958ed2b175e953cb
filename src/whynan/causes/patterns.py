"""Two calls that belong together: log of a softmax, log of a sigmoid, the root of a sum of squares.

In the source the inner call stands in the expression itself or in the one assignment of its name; in a replay its
arguments are remembered by the tensor it returned.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from whynan.causes import logspace
from whynan.causes.edits import as_operand
from whynan.causes.made import maker, without_zeros
from whynan.causes.source import Expression

_BASES = {"log2": math.log(2), "log10": math.log(10)}
REST = "1 - sigmoid"


def inner_swap(kind: str, name: str, plain_name: Callable[[Any], str]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Return the joint computation for a replay."""
    import torch

    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plain_name(func) != name or not args:
            return NotImplemented
        if kind == "sumsq":
            return _norm(torch, args[0]) if name != "pow" or args[1:] == (0.5,) else NotImplemented
        if kind == REST:
            return _log_of_rest(torch, args[0])
        made = maker(without_zeros(args[0]), kind)
        return NotImplemented if made is None else logspace.log_of(made) / _BASES.get(name, 1)

    return change


def _log_of_rest(torch: Any, value: Any) -> Any:
    """Compute log(1 - p) from the argument of the sigmoid that p is."""
    rest = maker(value, "rsub", "sub")
    inner = next((m for m in (maker(a, "sigmoid") for a in rest.args) if m is not None), None) if rest is not None else None
    one, taken = (rest.args[::-1] if rest.name == "rsub" else rest.args) if rest is not None and len(rest.args) == 2 else (None, None)
    exact = inner is not None and taken is inner.result and isinstance(one, int | float) and one == 1
    return torch.nn.functional.logsigmoid(-inner.args[0]) if exact and inner is not None else NotImplemented


def _norm(torch: Any, value: Any) -> Any:
    summed = maker(value, "sum")
    if summed is None:
        terms = _terms(value)
        alike = len(terms) > 1 and all(t is not None and t.shape == value.shape for t in terms)
        return torch.linalg.vector_norm(torch.stack(terms), dim=0) if alike else NotImplemented
    base = _square_root(summed.args[0])
    return NotImplemented if base is None else torch.linalg.vector_norm(base, dim=summed.dim, keepdim=summed.keepdim)


def _square_root(value: Any) -> Any:
    """Return what a value is the square of; None where it is none."""
    squared = maker(value, "pow", "square", "mul")
    if squared is None:
        return None
    base, *rest = squared.args
    power = rest[0] if squared.name == "pow" and rest and isinstance(rest[0], int | float) else None
    return base if not rest or rest[0] is base or power == 2 else None


def _terms(value: Any) -> list[Any]:
    """Return what the squares are taken of that add up to a value; None among them for what is no square."""
    added = maker(value, "add")
    plain = added is not None and len(added.args) == 2 and not added.kwargs
    return [base for term in added.args for base in _terms(term)] if added is not None and plain else [_square_root(value)]


def inner_text(expression: Expression, kind: str) -> tuple[Any, ...] | None:
    """Return the source text of the joint call's arguments, and changes that it needs elsewhere (pairs of a node and its new text)."""
    first = expression.nodes[0] if expression.nodes else None
    if kind == REST:
        first, kind = taken_from_one(expression, first), "sigmoid"
        found = _joint(expression, first, kind)
        return None if found is None else (as_operand(found[0]), *found[1:])
    return _joint(expression, first, kind)


def taken_from_one(expression: Expression, node: ast.expr | None) -> ast.expr | None:
    """Return p of `1 - p`, which may have a name."""
    given = expression.assigned(node.id) if isinstance(node, ast.Name) else node
    one = isinstance(given, ast.BinOp) and isinstance(given.op, ast.Sub) and isinstance(given.left, ast.Constant) and given.left.value == 1
    return given.right if one and isinstance(given, ast.BinOp) else None


def _joint(expression: Expression, first: ast.expr | None, kind: str) -> tuple[Any, ...] | None:
    if kind == "sumsq" and (text := _added_text(expression, first)) is not None:
        return (text,)
    node = _call(expression, first if kind == "sumsq" else _without_addend(expression, first, kind))
    if node is None:
        return None
    name, operands = expression.parts(node)
    if kind == "sumsq":
        text = _norm_text(expression, name, operands, node) if node is first or expression.is_repeatable(node) else None
        return None if text is None else (text,)
    if name.lower() != kind or not operands:
        return None
    rest = _rest_of(expression, node, operands)
    if rest is None:
        return None
    argument = expression.segment(operands[0])
    if any(part is node for part in ast.walk(expression.node)) or expression.is_repeatable(operands[0]):
        return (", ".join([argument, *rest]),)
    kept = expression.free_name("logits")  # computed once more it may be something else: it is given a name where it is made
    return ", ".join([kept, *rest]), (operands[0], f"{kept} := {argument}" if operands[0] in node.args else f"({kept} := {argument})")


def _without_addend(expression: Expression, node: ast.expr | None, kind: str) -> ast.expr | None:
    """Return the term of a sum that is a call of this kind: what is added to it was 0 in the replay, or this is not tried."""
    given = expression.assigned(node.id) if isinstance(node, ast.Name) else node
    if not isinstance(given, ast.BinOp) or not isinstance(given.op, ast.Add):
        return node
    for term, other in ((given.left, given.right), (given.right, given.left)):
        call = _call(expression, term)
        if call is not None and expression.parts(call)[0].lower() == kind and expression.is_repeatable(other):
            return term
    return node


def _rest_of(expression: Expression, node: ast.Call, operands: list[ast.expr]) -> list[str] | None:
    """Return the arguments after the first: those of the call, or those that the module which is called was made with."""
    given = [(None, o) for o in operands[1:]] + [(k.arg, k.value) for k in node.keywords if k.value not in operands]
    if replace(expression, node=node).calls_object():
        made = expression.construction(node)
        if made is None:
            return None
        given += [*((None, a) for a in made[0].args), *((k.arg, k.value) for k in made[0].keywords)]
        if not all(arg != "inplace" and is_number(value) for arg, value in given):
            return None
    return [expression.segment(value) if arg is None else f"{arg}={expression.segment(value)}" for arg, value in given]


def is_number(node: ast.expr) -> bool:
    """Whether a node is a number (or a word) written out: it means the same anywhere."""
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


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


def _added_text(expression: Expression, first: ast.expr | None) -> str | None:
    """Return the arguments of the norm for squares that are added up by hand."""
    node = expression.assigned(first.id) if isinstance(first, ast.Name) else first
    if not isinstance(node, ast.BinOp) or (node is not first and not expression.is_repeatable(node)):
        return None
    terms: list[ast.expr] = [node]
    while isinstance(terms[0], ast.BinOp) and isinstance(terms[0].op, ast.Add):
        terms[:1] = [terms[0].left, terms[0].right]
    bases = [_squared(expression, term) for term in terms]
    found = [expression.segment(base) for base in bases if base is not None]
    return f"torch.stack([{', '.join(found)}]), dim=0" if len(found) == len(terms) > 1 else None


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
        name, operands = expression.parts(node)
        if name == "square" and operands:
            return operands[0]
        if name == "pow" and len(operands) == 2 and isinstance(operands[1], ast.Constant) and operands[1].value == 2:
            return operands[0]
    return None
