"""Changes that look like a guard and change the objective, or change nothing: an eps on a count, a target that is normalised with its prediction."""

from __future__ import annotations

import ast
import re

from whynan.lint.calls import Operation, names_in, operation
from whynan.lint.facts import COUNTS, OTHER, Fact
from whynan.lint.rules.registry import on_binary, on_call
from whynan.lint.spot import LOW, MEDIUM, Spot

_ROUNDS_AWAY = 2.0**-24  # 1 plus this is 1 in float32
_MASK_NAME = re.compile(r"(^|[._])(\w*mask|valid|is_valid|keep)\w*$")
_ALONE = ("the eps on a count does nothing", "give the count a floor: mask.sum().clamp(min=1)")
_NORMALISERS = frozenset({"layer_norm", "instance_norm", "group_norm"})


@on_binary(ast.Div)
def quotient(spot: Spot, node: ast.BinOp) -> None:
    """Look at a / (count + eps)."""
    _counted(spot, node.left, node.right)


@on_call("div")
def called(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at torch.div(a, count + eps)."""
    if op is not None and len(op.operands) >= 2:
        _counted(spot, op.operands[0], op.operands[1])


def _counted(spot: Spot, above: ast.expr, below: ast.expr) -> None:
    below = _bound(spot, below)
    if not (isinstance(below, ast.BinOp) and isinstance(below.op, ast.Add)):
        return
    for counted, added in ((below.left, below.right), (below.right, below.left)):
        eps, fact = spot.of(added).number, spot.of(counted)
        if eps is None or not 0 < eps < _ROUNDS_AWAY or fact.owner == OTHER or not _is_count(spot, counted, fact):
            continue
        masked = bool(names_in(_bound(spot, above)) & names_in(spot.values.base(counted, spot.scope)))
        label = f"from a count of 1 on, adding {eps:g} changes nothing in float32; for a count of 0 "
        label += "it gives 0 only where the sum above is exactly 0" if masked else f"the sum above is multiplied by {1 / eps:g}"
        spot.report("WL117", _ALONE[0], label, _ALONE[1], spot.sure(LOW if masked else MEDIUM, fact.owner), note="in float16 it is 0, and 0 / 0 is nan")


def _is_count(spot: Spot, node: ast.expr, fact: Fact) -> bool:
    """Whether a value is a count: of a mask that is known, or of something that is called one."""
    return fact.kind in COUNTS or (fact.kind == "sum" and _MASK_NAME.search(ast.unparse(spot.values.base(node, spot.scope))) is not None)


@on_call("mse_loss")
def squared_error(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at mse_loss(a, b)."""
    if op is not None and len(op.operands) >= 2:
        _compared(spot, op.operands[0], op.operands[1])


@on_binary(ast.Pow)
def written_square(spot: Spot, node: ast.BinOp) -> None:
    """Look at (a - b) ** 2."""
    if spot.of(node.right).number == 2:
        _difference(spot, node.left)


@on_call("square", "pow")
def called_square(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at (a - b).square() and (a - b).pow(2)."""
    if op is not None and op.operand is not None and (op.name == "square" or (len(op.operands) >= 2 and spot.of(op.operands[1]).number == 2)):
        _difference(spot, op.operand)


def _difference(spot: Spot, node: ast.expr) -> None:
    node = _bound(spot, node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        _compared(spot, node.left, node.right)


def _compared(spot: Spot, a: ast.expr, b: ast.expr) -> None:
    """Report two values that were each brought to a scale of their own before their squared error."""
    if not spot.learning:
        return
    kinds = [_standardised(spot, _bound(spot, side)) for side in (a, b)]
    if all(kinds) and ast.dump(_bound(spot, a)) != ast.dump(_bound(spot, b)):
        spot.report(
            "WL118",
            "squared error of two values that are each normalised",
            "scale and offset of the prediction no longer count: a prediction ten times too large has the same loss",
            "normalise both by the statistics of the target, or of the data set, computed once",
            spot.sure(MEDIUM, max(spot.of(a).owner, spot.of(b).owner)),
        )


def _standardised(spot: Spot, node: ast.expr) -> bool:
    """Whether a value is divided by its own spread, or normalised without learned weights. Unit vectors (F.normalize) are meant: that is the cosine."""
    if isinstance(node, ast.Call):
        op = operation(spot.module, node)
        plain = not {"weight", "bias"} & (op.keywords.keys() if op is not None else set())
        return op is not None and op.name in _NORMALISERS and plain and len(op.operands) <= 2
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)):
        return False
    spread = next((c for c in ast.walk(_bound(spot, node.right)) if isinstance(c, ast.Call) and _is_spread(spot, c)), None)
    centred = isinstance(_bound(spot, node.left), ast.BinOp) and isinstance(_bound(spot, node.left).op, ast.Sub)  # type: ignore[attr-defined]
    return spread is not None and centred and bool(names_in(node.left) & names_in(spread) - {"self", "torch", "dim", "eps"})


def _is_spread(spot: Spot, call: ast.Call) -> bool:
    op = operation(spot.module, call)
    return op is not None and op.name in ("std", "var")


def _bound(spot: Spot, node: ast.expr) -> ast.expr:
    """Return what a name was last bound to in this function, or the expression itself."""
    for _ in range(3):
        if not isinstance(node, ast.Name):
            return node
        bound = spot.scope.reaching(node.id, (node.lineno, node.col_offset))
        if not bound or bound[0].value is None or bound[0].loop or bound[0].index is not None or bound[0].patch:
            return node
        node = bound[0].value
    return node
