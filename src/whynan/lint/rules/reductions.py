"""Reductions over nothing, over one thing, over the same thing."""

from __future__ import annotations

import ast

from whynan.lint.calls import Operation
from whynan.lint.facts import OTHER, TORCH
from whynan.lint.findings import Edit, Fix, Place
from whynan.lint.rules.registry import on_call
from whynan.lint.spot import LOW, MEDIUM, Spot, place


@on_call("std", "var", "std_mean", "var_mean")
def unbiased(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at a spread with Bessel's correction, which is nan for one element."""
    if op is None or op.operand is None:
        return
    fact = spot.of(op.operand)
    if fact.owner == OTHER or _uncorrected(op) or spot.guard(op.operand) == 2:
        return
    dim = op.argument(1, "dim", "axis")
    whole = dim is None or (isinstance(dim, ast.Constant) and dim.value == 0)
    words = (
        f"unbiased {op.name} of what can be one element",
        "the correction divides by n - 1: for one element 0 / 0 is nan",
        "pass unbiased=False, or treat one element apart",
    )
    owner = TORCH if op.sure else fact.owner
    spot.report("WN403", *words, spot.sure(MEDIUM if whole and (fact.kind in ("selection",) or dim is not None) else LOW, owner), fix=_biased(spot, node))


def _uncorrected(op: Operation) -> bool:
    for name in ("unbiased", "correction"):
        given = op.keywords.get(name)
        if isinstance(given, ast.Constant) and given.value in (False, 0):
            return True
    return any(isinstance(a, ast.Constant) and a.value is False for a in op.operands[1:]) or "correction" in op.keywords


def _biased(spot: Spot, node: ast.Call) -> Fix:
    end = place(node)
    at = Place(end.end_line, end.end_column - 1, end.end_line, end.end_column - 1)
    return Fix((Edit(at, ("" if not (node.args or node.keywords) else ", ") + "unbiased=False"),), False)


@on_call("mean", "mse_loss", "l1_loss", "smooth_l1_loss")
def of_a_selection(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at the mean of what a mask selects."""
    if op is None or op.operand is None or (op.argument(1, "dim") is not None and op.name == "mean"):
        return
    chosen = _selection(spot, op.operand)
    if chosen is None or spot.guard(chosen) or spot.covered_later():
        return
    if op.name != "mean" and isinstance(op.keywords.get("reduction"), ast.Constant) and getattr(op.keywords["reduction"], "value", "") != "mean":
        return
    fact = spot.of(op.operand)
    words = ("mean over a selection that can be empty", "the mean of nothing is 0 / 0: nan", "sum and divide by the number selected, clamped at 1")
    spot.report("WN402", *words, spot.sure(MEDIUM, TORCH if op.sure else fact.owner), origin=chosen, origin_label="selected here")


def _selection(spot: Spot, node: ast.expr) -> ast.expr | None:
    """x[mask], also under a name or inside arithmetic."""
    for _ in range(5):
        if isinstance(node, ast.Subscript):
            return node.slice if spot.of(node.slice).kind == "mask" and isinstance(node.slice, ast.Name | ast.Compare | ast.BinOp | ast.UnaryOp) else None
        if isinstance(node, ast.Name):
            bound = spot.scope.reaching(node.id, (node.lineno, node.col_offset))
            if not bound or bound[0].value is None or bound[0].patch or bound[0].loop or bound[0].index is not None:
                return None
            node = bound[0].value
        elif isinstance(node, ast.BinOp):
            left = _selection(spot, node.left)
            if left is not None:
                return left
            node = node.right
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("abs", "square", "pow", "log", "exp", "float", "sum"):
            node = node.func.value
        elif isinstance(node, ast.Call) and len(node.args) >= 1 and isinstance(node.func, ast.Attribute) and node.func.attr in ("masked_select",):
            return node.args[-1]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
            node = node.args[0]
        else:
            return None
    return None


@on_call("normalize", "layer_norm", "cosine_similarity", "LayerNorm", "BatchNorm1d", "BatchNorm2d", "GroupNorm", "Adam", "AdamW", "RMSNorm", "RMSprop")
def given_eps(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at an eps of 0 or one that is lost in half."""
    if op is None or "eps" not in op.keywords or not op.module.startswith("torch"):
        return
    value = spot.of(op.keywords["eps"]).number
    if value == 0:
        code = "WN604" if op.name in ("Adam", "AdamW", "RMSprop") else "WN404"
        words = (f"{op.name} with eps=0", "nothing keeps its denominator from 0", "leave eps at its default, in half 1e-4")
        spot.report(code, *words, MEDIUM, origin=_first_step(spot, node), origin_label="the update happens here")


def _first_step(spot: Spot, node: ast.Call) -> ast.AST | None:
    statement = spot.statement
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if target is None:
        return None
    wanted = ast.unparse(target)
    for found in ast.walk(spot.module.tree):
        if isinstance(found, ast.Call) and isinstance(found.func, ast.Attribute) and found.func.attr == "step" and ast.unparse(found.func.value) == wanted:
            return found
    return None
