"""What the arguments of an operation are called: what the source calls them, else the model, else their place."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, cast

from whynan.capsule.sites import resolve
from whynan.causes.facts import as_view, is_same
from whynan.causes.fixes import source_name
from whynan.causes.source import Expression, expression_at
from whynan.records import Phase
from whynan.trace.slicing import base

if TYPE_CHECKING:
    from whynan.trace.birth import View
    from whynan.trace.graph import Leaf

_PRODUCTS = ("mm", "bmm", "mv", "dot")
# what the source calls an operation that has another name inside of torch
_CALLED = {
    **dict.fromkeys(_PRODUCTS, ("matmul", "linear")),
    "addmm": ("linear",),
    "eigh": ("eigvalsh",),
    "svd": ("svdvals",),
    "slogdet": ("logdet",),
    "vector_norm": ("norm",),
    "reciprocal": ("div",),
    "to_copy": ("to", "float", "half", "bfloat16", "double", "type"),
}
_LINEAR = {"addmm": {"self": 2, "mat1": 0, "mat2": 1}, "mm": {"self": 0, "mat2": 1}}
_OF_LINEAR = ("input", "weight", "bias")
_QUOTIENT = {"tensor1": "numerator", "tensor2": "denominator"}
# names that only torch's schemas have; the others (weight, mask, target) say what they are
_SCHEMA = frozenset({"self", "other", "mat1", "mat2", "batch1", "batch2", "vec", "vec2", "tensor", "tensor1", "tensor2", "A", "B", "LD", "LU"})
_SAME = frozenset({"t", "_to_copy", "detach", "alias"})


def names_of(view: View, expression: Expression | None) -> dict[str, str]:
    """Name an operation's arguments for a reader."""
    return _of_place(view) | named_by_source(view, expression)


def named_by_source(view: View, expression: Expression | None) -> dict[str, str]:
    """Call an operation's arguments what the source calls them, where the two fit together."""
    found = _fitted(view, expression)
    if found or view.site is None or view.op.backward:
        return found
    return _fitted(view, expression_at(view.site, resolve(view.site).file))  # what is pointed at may be another line


def _fitted(view: View, expression: Expression | None) -> dict[str, str]:
    kept = list(dict.fromkeys(s.name.partition("[")[0] for s in view.sources))  # of lists one name for all members
    if expression is None:
        return {}
    if isinstance(expression.node, ast.Subscript):
        return _one_line(dict(zip(kept, _indexed(expression, expression.node), strict=False))) if view.name == "index" else {}
    name, ran = source_name(expression.name), _bare(view.name)
    if not expression.operands or (name != ran and name not in _CALLED.get(ran, ())):
        return {}
    texts = expression.operands
    if name == "linear":
        texts = [*texts, *(v for k, v in expression.keywords.items() if k in _OF_LINEAR[len(texts) :])]
        return _one_line({argument: texts[place] for argument, place in _LINEAR.get(ran, {}).items() if place < len(texts)})
    if len(kept) == 1 and len(texts) == 2:  # the other operand is a number
        numbers = [_looks_numeric(text) for text in texts]
        if ran in ("mul", "add") and not any(numbers):
            return {}  # `beta * x` and `x * beta` arrive alike
        if numbers[0] or ".__r" in view.op.call:
            texts = texts[1:]
    if ran in _PRODUCTS and _turned(view):
        texts = texts[::-1]
    return _one_line(_of_members(view, expression, dict(zip(kept, texts, strict=False))))


def _of_members(view: View, expression: Expression, names: dict[str, str]) -> dict[str, str]:
    """Name the members of lists: `values[2]`, and by what is written there in `torch.cat([a, b])`."""
    written = {" ".join(expression.segment(n).split()): n.elts for n in expression.nodes if isinstance(n, ast.List | ast.Tuple)}
    found: dict[str, str] = {}
    for source in view.sources:
        stem, opened, place = source.name.partition("[")
        text = " ".join(names.get(stem, "").split())
        elements = written.get(text, [])
        if not text or not opened:
            found |= {source.name: text} if text else {}
        elif elements and int(place[:-1]) < len(elements) and not any(isinstance(e, ast.Starred) for e in elements):
            found[source.name] = expression.segment(elements[int(place[:-1])])
        elif text.replace(".", "").isidentifier():
            found[source.name] = f"{text}[{place}"
    return found


def _one_line(names: dict[str, str]) -> dict[str, str]:
    return {name: " ".join(text.split()) for name, text in names.items() if len(text) < 60}


def _bare(name: str) -> str:
    """Return the name of an operation without what torch puts around it: `_linalg_solve_ex` is `solve`."""
    return name.strip("_").removeprefix("linalg_").removesuffix("_ex")


def _indexed(expression: Expression, node: ast.Subscript) -> list[str]:
    """Return what is indexed and its indices, where all of them are tensors."""
    indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    plain = any(isinstance(i, ast.Slice | ast.Constant | ast.UnaryOp | ast.Starred) for i in indices)
    return [expression.segment(n) for n in ([node.value] if plain else [node.value, *indices])]


def _turned(view: View) -> bool:
    """Whether a product of a matrix with a batch of them was computed as that of their transposes, in the other order."""
    step = as_view(view.maker(0))
    while step is not None and step.site == view.site and step.call == view.call and step.op.entry == view.op.entry:
        if step.name == "transpose":
            return view.name in ("mm", "mv")
        step = as_view(step.maker(0)) if step.op.sources else None
    return False


def _of_place(view: View) -> dict[str, str]:
    """Name arguments by the weights that they are, or by where they stand."""
    sources = view.sources
    linear = _LINEAR.get(view.name, {}) if view.call.endswith("linear") else {}
    names: dict[str, str] = {}
    for place, source in enumerate(sources, 1):
        neutral = f"argument {place}" if len(sources) > 1 else "argument"
        if source.name in linear:
            neutral = _OF_LINEAR[linear[source.name]]
        elif view.name.startswith("nll_loss") and source.name == "self":
            neutral = "log-probabilities"
        stem = source.name if view.member is None else source.name.partition("[")[0]
        if view.name.removeprefix("_foreach_") == "addcdiv":
            neutral = _QUOTIENT.get(stem, neutral)
        if stem in _SCHEMA:
            names[source.name] = _weight(view, source.name) or _of_update(view, source.name) or neutral
    return names


def _of_update(view: View, name: str) -> str:
    """Return what an argument of an optimizer's own arithmetic is: a gradient, or a state by its name; the average of squares is known by what it takes in."""
    if view.birth.phase is not Phase.OPTIMIZER:
        return ""
    made = view.maker(name)
    while (step := as_view(made)) is not None and not step.op.backward and (step.name in _SAME or base(step.op).endswith("_")) and step.op.sources:
        made = _handed_on(view, step)
    if step is not None:
        member = name.removeprefix("self")
        squares = view.name.removeprefix("_foreach_") == "addcmul" and name.startswith("self")
        averaged = squares and is_same(view.maker(f"tensor1{member}"), view.maker(f"tensor2{member}"))
        return "gradient" if step.op.backward else "second moment" if averaged else ""
    leaf = cast("Leaf", made)
    return "gradient" if leaf.role == "gradient" else leaf.name if leaf.role == "state" else ""


def _handed_on(view: View, step: View) -> View | Leaf | None:
    """Return what an operation on the way gave on as it was, or wrote to: of lists the same member."""
    return step.maker(f"self[{view.member}]" if view.member is not None and base(step.op).startswith("_foreach_") else 0)


def _weight(view: View, name: str) -> str:
    """Return the name of the weight that an argument is, as it is or transposed."""
    made, turned = view.maker(name), False
    while (step := as_view(made)) is not None and (step.name in _SAME or base(step.op).endswith("_")):  # a write leaves it the same weight
        turned ^= step.name == "t"
        made = _handed_on(view, step)
    leaf = cast("Leaf | None", made) if step is None else None
    known = leaf is not None and leaf.role in ("parameter", "buffer") and leaf.name
    return f"{leaf.name}{'.T' if turned else ''}" if leaf is not None and known else ""


def _looks_numeric(text: str) -> bool:
    return text.replace(".", "").replace("-", "").replace("e", "").strip("() ").isdigit()
