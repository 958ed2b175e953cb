"""Guards on the output instead of the input: where, masked_fill, a mask, an index, a clamp or nan_to_num after the hazard."""

from __future__ import annotations

import ast

from whynan.lint.calls import Operation, names_in, operation
from whynan.lint.facts import OTHER, TORCH, Fact
from whynan.lint.rules.registry import on_call
from whynan.lint.spot import HIGH, LOW, MEDIUM, Spot

_STEEP = ("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "log1p", "acos", "asin")


@on_call("where")
def branch(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at the arms of where."""
    if op is None or len(op.operands) < 3 or not op.sure:
        return
    asked = names_in(op.operands[0])
    for arm in op.operands[1:3]:
        hazard = _hazard(spot, arm)
        if hazard is None:
            continue
        where, argument, fact = hazard
        if not fact.graph or fact.owner == OTHER or not asked & _related(spot, argument, fact):
            continue
        sure = HIGH if (fact.nonnegative or isinstance(argument, ast.Name)) and fact.owner == TORCH and spot.learning and spot.flows(argument) else MEDIUM
        words = (
            "where guards the output, not the input",
            f"the arm not taken still sends back the slope of `{spot.text(where)}`: inf * 0 is nan",
            "make the input safe first: torch.where(ok, x, 1.0), then the function, then where again",
        )
        spot.report("WN502", *words, sure, of=argument)
        return


def _related(spot: Spot, argument: ast.expr, fact: Fact) -> set[str]:
    """The names an argument stands for; through its definition too where it is known to reach 0."""
    names = names_in(argument)
    for name in list(names) if fact.nonnegative else ():
        for bound in (spot.scope.reaching(name, (argument.lineno, argument.col_offset)) or [])[:1]:
            if bound.value is not None:
                names |= names_in(bound.value)
    return names - {"self", "torch"}


@on_call("masked_fill", "nan_to_num", "clamp", "clamp_min")
def afterwards(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at a hazard whose result is patched."""
    if op is None or op.operand is None:
        return
    hazard = _hazard(spot, op.operand, direct=True)
    if hazard is None:
        return
    where, argument, fact = hazard
    if not fact.graph or fact.owner == OTHER:
        return
    known = fact.kind not in ("parameter", "", "attribute", "selection") and fact.owner == TORCH
    sure = HIGH if known and fact.nonnegative and spot.learning and op.name != "clamp_min" and spot.flows(argument) else LOW if fact.owner != TORCH else MEDIUM
    words = (
        f"{op.name} after `{spot.text(where)}` hides the value, not the slope",
        "the entry that is covered still sends back inf * 0: nan",
        "guard the input of the function, not its output",
    )
    spot.report("WN502", *words, spot.sure(sure, TORCH if op.sure or fact.owner == TORCH else fact.owner), of=argument)


def _hazard(spot: Spot, node: ast.expr, direct: bool = False) -> tuple[ast.expr, ast.expr, Fact] | None:
    """The first operation in an expression whose slope is infinite where its argument may be."""
    for inner in [node] if direct else ast.walk(node):
        if isinstance(inner, ast.Call):
            op = operation(spot.module, inner)
            if op is not None and op.name in _STEEP and op.operand is not None:
                fact = spot.of(op.operand)
                if _reaches(op.name, fact):
                    return inner, op.operand, fact
        elif isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Div):
            fact = spot.of(inner.right)
            if (
                fact.can_be_zero
                and fact.number is None
                and fact.owner != OTHER
                and fact.kind not in ("size", "epsilon", "foreign", "argument", "softmax", "exp", "softplus", "" if direct else "size")
            ):
                return inner, inner.right, fact
        elif isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Pow):
            n, fact = spot.of(inner.right).number, spot.of(inner.left)
            if n is not None and n < 1 and n != 0 and fact.can_be_zero and fact.number is None:
                return inner, inner.left, fact
    return None


def _reaches(name: str, fact: Fact) -> bool:
    if fact.eased or fact.number is not None or fact.owner == OTHER:
        return False
    if name in ("acos", "asin"):
        return fact.high >= 1
    return fact.low <= (-1.0 if name == "log1p" else 0.0) and not (fact.positive and fact.kind not in ("softmax", "sigmoid"))


def index_after(spot: Spot, node: ast.Call) -> bool:
    """Whether the result of a call is indexed by a mask or multiplied by one."""
    outer = spot.parents.get(id(node))
    if isinstance(outer, ast.Subscript) and outer.value is node:
        return spot.of(outer.slice).kind == "mask"
    if isinstance(outer, ast.BinOp) and isinstance(outer.op, ast.Mult):
        return spot.of(outer.right if outer.left is node else outer.left).kind == "mask"
    return False


@on_call("log", "sqrt", "rsqrt", "log2", "log10")
def selected_after(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at log(x)[mask] and sqrt(x) * mask."""
    if op is None or op.operand is None or not index_after(spot, node):
        return
    fact = spot.of(op.operand)
    if _reaches(op.name, fact) and fact.graph:
        words = (
            f"mask after {op.name} instead of before",
            f"the entries left out still send back the slope of {op.name}: inf * 0 is nan",
            f"select first, then take {op.name}",
        )
        spot.report("WN502", *words, spot.sure(MEDIUM if fact.owner == TORCH else LOW, TORCH if op.sure else fact.owner))


@on_call("nan_to_num")
def cure(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at nan_to_num used on activations, losses or gradients."""
    if op is None or op.operand is None:
        return
    fact = spot.of(op.operand)
    if fact.owner == OTHER or spot.frame.no_grad or any(w in spot.text(op.operand) for w in ("grad",)):
        return
    words = (
        "nan_to_num as a cure",
        "the value becomes 0 and is trained on as if it were true; the gradient behind it stays nan",
        "find where it is born: whynan run; guard that input instead",
    )
    spot.report("WL104", *words, spot.sure(MEDIUM, TORCH if op.sure else fact.owner))
