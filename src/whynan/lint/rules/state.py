"""Parameters that nobody fills."""

from __future__ import annotations

import ast
import re

from whynan.lint.calls import operation
from whynan.lint.rules.registry import on_statement
from whynan.lint.spot import MEDIUM, Spot

_MAKERS = ("empty", "empty_like", "new_empty", "Tensor", "FloatTensor")


@on_statement(ast.ClassDef)
def unfilled(spot: Spot, node: ast.stmt) -> None:
    """Look at nn.Parameter(torch.empty(...)) that no line of the class gives a value."""
    owner = spot.scope.owner
    if owner is None:
        return
    for name, assigned in spot.module.fields(owner).items():
        for value, scope in assigned:
            made = _made_empty(spot, value, scope.bindings)
            if made is None or _filled(spot, name, value):
                continue
            words = (
                f"parameter `{name}` never given a value",
                "torch.empty hands out memory as it was: any number, or nan",
                "initialise it: nn.init, or torch.zeros",
            )
            spot.report("WN608", *words, MEDIUM, node=value, origin=_use(spot, name, value), origin_label="it is used here")


def _made_empty(spot: Spot, value: ast.expr, bindings: object) -> ast.expr | None:
    if (
        not isinstance(value, ast.Call)
        or not (spot.module.dotted(value.func).endswith("nn.Parameter") or spot.module.dotted(value.func).endswith("parameter.Parameter"))
        or not value.args
    ):
        return None
    inner = value.args[0]
    if isinstance(inner, ast.Name) and isinstance(bindings, dict):
        bound = bindings.get(inner.id, [])
        if (
            len(bound) >= 1
            and bound[0].value is not None
            and not any(b.value is not None and isinstance(b.value, ast.Call) and str(getattr(b.value.func, "attr", "")).endswith("_") for b in bound[1:])
        ):
            inner = bound[0].value
    op = operation(spot.module, inner) if isinstance(inner, ast.Call) else None
    return inner if op is not None and op.name in _MAKERS and (op.module.startswith("torch.") or op.name == "new_empty") else None


def _filled(spot: Spot, name: str, value: ast.expr) -> bool:
    """Whether the class, or a reset method it inherits or calls, writes into the parameter."""
    owner = spot.scope.owner
    assert owner is not None
    text = "\n".join(spot.module.lines[owner.node.lineno - 1 : owner.node.end_lineno])
    own = rf"self\.{name}"
    writes = "|".join(
        (
            rf"{own}(\.data)?\.\w+_\(",
            rf"init\w*\.\w+\(\s*{own}\b",
            rf"\w+_\(\s*{own}\b",
            rf"{own}\.data\s*=",
            rf"{own}(\.data)?\[[^\n]*\]\s*=[^=]",
            rf"\b(glorot|zeros|ones|uniform|reset|init\w*|_init\w*)\(\s*{own}\b",
            r"copy_\(",
        )
    )
    if re.search(writes, text) or re.search(r"for \w+ in self\.parameters\(\)|self\.named_parameters\(\)|self\.apply\(", text):
        return True
    known = {"Module", "nn.Module", "torch.nn.Module"}
    bases = {ast.unparse(b) for b in owner.node.bases}
    if not bases <= known and "reset_parameters" not in owner.methods:
        return True
    return re.search(rf"_init_weights|init_weights|\.{name}(\.data)?\.\w+_\(|init\.\w+\(\s*\w+\.{name}\b", spot.module.text) is not None


def _use(spot: Spot, name: str, value: ast.expr) -> ast.AST | None:
    owner = spot.scope.owner
    forward = owner.methods.get("forward") if owner is not None else None
    for node in ast.walk(forward) if forward is not None else ():
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.value, ast.Name) and node.value.id == "self":
            return node
    return None
