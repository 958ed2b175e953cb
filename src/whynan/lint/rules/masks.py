"""Masks of -inf: rows in which nothing is left, and guards that only see the case that everything is masked."""

from __future__ import annotations

import ast
import re

from whynan.lint.callees import layer
from whynan.lint.calls import Operation
from whynan.lint.facts import TORCH
from whynan.lint.rules.registry import on_call, on_statement
from whynan.lint.spot import HIGH, LOW, MEDIUM, Spot

_INFINITE = re.compile(r"-\s*(float\(['\"]inf['\"]\)|math\.inf|torch\.inf|np\.inf|inf\b)|float\(['\"]-inf['\"]\)|NEG_?INF", re.IGNORECASE)
_GUARDED = re.compile(r"isnan|nan_to_num|isinf|isfinite|isneginf|\.all\(|finfo|fully_masked|_unmask_unattended|\.any\(")
_CAUSAL = re.compile(r"causal|triu|tril|top_?k|top_?p|subsequent|future|look_?ahead|kth|sorted", re.IGNORECASE)
_PADDING = re.compile(r"pad|key_mask|src_mask", re.IGNORECASE)


@on_call("softmax", "log_softmax", "logsumexp")
def masked(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at a softmax over values with -inf in them."""
    if op is None or op.operand is None:
        return
    fact = spot.of(op.operand)
    if not fact.masked or _row_guard(spot):
        return
    source = ast.unparse(fact.node) if isinstance(fact.node, ast.expr) else spot.text(op.operand)
    body = _function_text(spot)
    sure = LOW if _CAUSAL.search(source) or (_CAUSAL.search(body) and not _PADDING.search(source)) else MEDIUM
    what = "its gradient is nan" if op.name == "logsumexp" else f"{op.name} of a row of -inf is nan"
    words = (
        f"{op.name} over a row that can be fully masked",
        f"where every entry is masked, {what}",
        "unmask one entry of such rows, or use torch.finfo(x.dtype).min instead of -inf and zero the row afterwards",
    )
    spot.report("WN401", *words, spot.sure(sure, TORCH if op.sure else fact.owner), origin=fact.node, origin_label="-inf is written here")


@on_call("()")
def attention_module(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at nn.MultiheadAttention with a padding mask."""
    keywords = {k.arg for k in node.keywords}
    if "key_padding_mask" not in keywords or layer(node.func, spot.scope) not in ("MultiheadAttention", "TransformerEncoder", "Transformer"):
        return
    given = next(k.value for k in node.keywords if k.arg == "key_padding_mask")
    if isinstance(given, ast.Constant) or _row_guard(spot):
        return
    words = (
        "attention over a sample that can be all padding",
        "where every key is masked, its softmax is over a row of -inf: nan",
        "drop such samples, or leave one key of each unmasked",
    )
    spot.report("WN401", *words, MEDIUM)


@on_call("scaled_dot_product_attention")
def fused(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at a float mask of -inf given to the fused attention."""
    mask = op.argument(3, "attn_mask") if op is not None else None
    fact = spot.of(mask)
    if mask is not None and fact.masked and not _row_guard(spot):
        words = (
            "attention over a row that can be fully masked",
            "a row of -inf has no softmax; kernels and versions differ in what they give",
            "pass a bool mask, and leave one key of each row unmasked",
        )
        spot.report("WN401", *words, LOW, origin=fact.node, origin_label="-inf is written here")


@on_call("cross_entropy", "nll_loss", "ctc_loss", "CTCLoss")
def infeasible(spot: Spot, op: Operation | None, node: ast.Call) -> None:
    """Look at losses whose target may have no probability at all."""
    if op is None or (not op.operands and op.name != "CTCLoss"):
        return
    if op.name in ("ctc_loss", "CTCLoss"):
        if op.name == "CTCLoss" and not op.module.startswith("torch.nn"):
            return
        given = op.keywords.get("zero_infinity")
        if given is None or (isinstance(given, ast.Constant) and given.value is False):
            words = (
                "CTC loss without zero_infinity",
                "a target longer than its input has probability 0: the loss is inf",
                "pass zero_infinity=True, and count the samples it drops",
            )
            spot.report("WN405", *words, MEDIUM)
        return
    if spot.of(op.operands[0]).masked:
        words = (
            "loss of a class that can be masked",
            "where the target itself is masked with -inf the loss is inf",
            "check that no target is masked, or drop such samples",
        )
        spot.report("WN405", *words, LOW, origin=spot.of(op.operands[0]).node, origin_label="-inf is written here")
    elif op.name == "cross_entropy" and "ignore_index" in op.keywords and not _sums(op):
        words = (
            "mean over targets that can all be ignored",
            "where every target is ignored the mean is 0 / 0",
            "use reduction='sum' and divide by the count clamped at 1",
        )
        spot.report("WN402", *words, LOW)


def _sums(op: Operation) -> bool:
    given = op.keywords.get("reduction")
    return isinstance(given, ast.Constant) and given.value in ("sum", "none")


@on_statement(ast.If)
def all_rows_only(spot: Spot, node: ast.stmt) -> None:
    """Look at `if (scores == -inf).all():`, which is true only when every row is masked."""
    if not isinstance(node, ast.If) or not spot.mentions("inf", "INF") or not _INFINITE.search(written := ast.unparse(node.test)):
        return
    body = _function_text(spot)
    for call in ast.walk(node.test):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "all" and not call.args and not call.keywords:
            compared = call.func.value
            if isinstance(compared, ast.Compare | ast.Call) and _INFINITE.search(written) and isinstance(getattr(compared, "ops", [ast.Eq()])[0], ast.Eq):
                words = (
                    "guard that sees only the case that every row is masked",
                    "one masked row in a batch of others still gives nan",
                    "ask per row: (scores == -inf).all(dim=-1, keepdim=True), and use torch.where",
                )
                spot.report("WL114", *words, HIGH if "softmax" in body or "logsumexp" in body else LOW, node=node.test)


def _row_guard(spot: Spot) -> bool:
    """Whether the rows are looked after: in the same expression, or by a line of the function about the same names."""
    if any(isinstance(o, ast.Call) and isinstance(o.func, ast.Attribute) and o.func.attr in ("nan_to_num", "where", "masked_fill") for o in spot.above()):
        return True
    return _GUARDED.search(_function_text(spot)) is not None


def _function_text(spot: Spot) -> str:
    node = spot.scope.node
    if isinstance(node, ast.Module):
        return "\n".join(spot.module.lines[max(spot.statement.lineno - 15, 0) : spot.statement.lineno + 5])
    return "\n".join(spot.module.lines[node.lineno - 1 : node.end_lineno])
