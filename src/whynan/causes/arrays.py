"""Explain what numpy made: by the operation that numpy complained about, and the expression at that place."""

from __future__ import annotations

import ast
from dataclasses import replace

from whynan.capsule.sites import resolve
from whynan.causes.catalogue import Scene, rules
from whynan.causes.source import expression_at
from whynan.errors import let_through
from whynan.records import Cause, Confidence, Origin, Phase, Remedy
from whynan.trace.arrays import Fault, first_fault, warned
from whynan.trace.birth import Birth
from whynan.trace.graph import OUTSIDE
from whynan.trace.locate import infinities_behind

_CALLS = {
    "divide by zero": {"log": "WN101", "log2": "WN101", "log10": "WN101", "log1p": "WN101", "power": "WN106", "reciprocal": "WN106", "arctanh": "WN107"},
    "overflow": {"exp": "WN201", "expm1": "WN201", "exp2": "WN201", "sinh": "WN201", "cosh": "WN201"},
    "invalid value": {"log": "WN102", "log2": "WN102", "log10": "WN102", "log1p": "WN102", "sqrt": "WN105", "power": "WN105",
                      "arccos": "WN107", "arcsin": "WN107", "arccosh": "WN107", "arctanh": "WN107", "multiply": "WN302"},
}  # fmt: skip
_OPERATORS: dict[str, dict[type[ast.operator], str]] = {
    "divide by zero": {ast.Div: "WN103", ast.Pow: "WN106"},
    "overflow": {},
    "invalid value": {ast.Div: "WN104", ast.Pow: "WN105", ast.Sub: "WN301", ast.Add: "WN301", ast.Mult: "WN302"},
}
_OTHERWISE = {"divide by zero": "WN103", "overflow": "WN203"}


def in_arrays(scene: Scene, birth: Birth, origin: Origin, cause: Cause) -> tuple[Origin, Cause, list[Remedy]] | None:
    """Go on to the line at which numpy made a bad value, where a replay runs that line again."""
    leaves = [birth.leaf] if birth.leaf is not None else infinities_behind(birth) if cause.confidence is Confidence.SUSPECTED else []
    if not any(leaf.role in ("constant", OUTSIDE) for leaf in leaves):
        return None
    try:
        with scene.program.still():
            fault = first_fault(scene.program.play)
    except Exception as error:  # a program that turns numpy's complaints into exceptions, or too little memory
        let_through(error)
        return None
    if fault is None:
        return None
    expression = expression_at(fault.site, resolve(fault.site).file)
    chosen = rules().get(_code_of(fault, expression.node if expression is not None else None))
    words = f"numpy computed it, outside of torch: {fault.kind}" + "".join(f"; {value}" for value in fault.values)
    there = resolve(fault.site)
    span = replace(origin.span, label="handed to torch here")
    beside = (span, *origin.from_) if span.known and span.line != there.line else origin.from_
    told = replace(cause, evidence=(*cause.evidence, words), label=f"numpy: {fault.kind}")
    if chosen is not None:
        told = replace(told, code=chosen.code, slug=chosen.slug, title=chosen.title, evidence=(words,))
    phase = Phase.FORWARD if origin.phase is Phase.INPUT else origin.phase
    advice = Remedy("guard this line against that value, or compute it in torch, where a change can be replayed")
    return replace(origin, phase=phase, span=there, from_=beside, exact=True, note=""), told, [advice]


def as_warned(birth: Birth, origin: Origin, cause: Cause) -> tuple[Origin, Cause]:
    """Go on to the line that numpy has warned of, where there is one: what it made was not followed from there."""
    found = warned(birth.leaf is not None and birth.leaf.damage.nan)
    if found is None or birth.phase is not Phase.INPUT or (origin.span.file, origin.span.line) == (found[0].file, found[0].line):
        return origin, cause
    note = "numpy warned of this line in this run; that the value comes from there was not seen"
    handed_in = replace(origin.span, label=cause.label)
    moved = replace(origin, span=found[0], from_=(handed_in, *origin.from_), exact=False, note=note)
    return moved, replace(cause, label=f"numpy: {found[1]}")


def _code_of(fault: Fault, node: ast.AST | None) -> str:
    """Return the code of what numpy complained about, by the expression at that place; nothing where it does not say."""
    if isinstance(node, ast.BinOp | ast.AugAssign):
        return _OPERATORS[fault.kind].get(type(node.op)) or _OTHERWISE.get(fault.kind, "")
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("divide", "true_divide"):
            return _OPERATORS[fault.kind].get(ast.Div, "")
        return _CALLS[fault.kind].get(name, "WN203" if fault.kind == "overflow" else "")
    return ""
