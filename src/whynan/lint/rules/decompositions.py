"""Matrices without an inverse, and gradients of decompositions with repeated values."""

from __future__ import annotations

import ast

from whynan.lint.calls import Operation
from whynan.lint.facts import OTHER, TORCH, Fact
from whynan.lint.rules.registry import on_call
from whynan.lint.spot import LOW, MEDIUM, Spot


@on_call("cholesky", "inv", "solve", "logdet", "slogdet", "det", "cholesky_inverse")
def singular(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at a matrix that nothing keeps regular."""
    if op is None or op.operand is None:
        return
    fact = spot.of(op.operand)
    if fact.owner == OTHER or op.name == "det" or _jittered(spot, op.operand, fact) or "_ex" in op.module:
        return
    sure = MEDIUM if fact.kind == "matmul" else LOW
    words = (
        f"{op.name} of a matrix that can be singular",
        "equal or dependent rows leave no inverse: it raises, or gives inf",
        "add a jitter to the diagonal: A + 1e-5 * torch.eye(n)",
    )
    owner = TORCH if op.sure else fact.owner
    spot.report("WN108", *words, spot.sure(sure, owner) if op.sure or fact.owner == TORCH else None, origin=fact.node, origin_label="the matrix was made here")


def _jittered(spot: Spot, node: ast.expr, fact: Fact) -> bool:
    """Whether something like eps * eye was added."""
    if fact.eased:
        return True
    written = ast.unparse(node)
    if isinstance(node, ast.Name):
        for bound in spot.scope.bindings.get(node.id, []):
            written += ast.unparse(bound.value) if bound.value is not None else ""
    return any(word in written for word in ("eye", "jitter", "eps", "diag", "ridge", "lambda", "reg"))


@on_call("eigh", "svd", "eig", "symeig", "pinv")
def degenerate(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at decompositions through which a gradient may flow."""
    if op is None or op.operand is None or not op.sure:
        return
    fact = spot.of(op.operand)
    if fact.owner == OTHER or not fact.graph or spot.frame.no_grad:
        return
    words = (
        f"gradient of {op.name} with repeated values",
        "the slope has 1 / (a - b) of two singular or eigenvalues: inf where they are equal",
        "detach it, use the values only, or break the tie with a small jitter",
    )
    spot.report("WN504", *words, LOW if fact.kind in ("parameter", "") else MEDIUM)
