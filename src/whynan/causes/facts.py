"""Small questions about values and lineage that several rules ask. No torch import: tensors bring their own methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from whynan.records import number

if TYPE_CHECKING:
    import torch

    from whynan.trace.birth import Birth, View
    from whynan.trace.graph import Leaf

LIMITS = {"float16": 65504.0, "bfloat16": 3.39e38, "float32": 3.4028e38, "float64": 1.797e308}
ELEMENTWISE = frozenset(
    {"add", "sub", "rsub", "mul", "div", "neg", "abs", "clamp", "clamp_min", "clamp_max", "view", "_unsafe_view", "expand", "unsqueeze", "squeeze",
     "transpose", "permute", "t", "clone", "detach", "alias", "_to_copy", "slice", "select", "maximum", "minimum", "sqrt", "pow", "where", "masked_fill",
     "reshape", "repeat", "exp", "relu"}
)  # fmt: skip
VIEWS = frozenset(
    {
        "view",
        "_unsafe_view",
        "expand",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "t",
        "clone",
        "detach",
        "alias",
        "_to_copy",
        "reshape",
        "select",
        "slice",
        "neg",
    }
)
SELECTS = frozenset(
    {"where", "masked_fill", "nan_to_num", "index", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "masked_select", "mul", "gather", "index_select",
     "select", "min", "max", "amax", "amin", "take", "slice", "scatter", "index_put", "sort", "topk"}
)  # fmt: skip


def zeros(tensor: torch.Tensor | None) -> int:
    """Count exact zeros."""
    return 0 if tensor is None else int((tensor == 0).sum())


def share(count: int, tensor: torch.Tensor, what: str) -> str:
    """Say `213 of 320 probabilities are 0`.

    >>> class T:
    ...     def numel(self): return 320
    >>> share(213, T(), "values are 0")
    '213 of 320 values are 0'
    """
    total = tensor.numel()
    if total == 1:
        return f"the only {what.replace('values are', 'value is')}"
    return f"{count} of {total} {what}"


def where_bad(tensor: torch.Tensor | None) -> Any:
    """Return a boolean tensor of the non-finite places."""
    return None if tensor is None else ~tensor.isfinite()


def rows(condition: Any, limit: int = 4) -> str:
    """Name the first rows at which a condition holds: `row 3`, `rows 0, 4, 7 …`."""
    if condition is None or condition.dim() == 0:
        return ""
    hit = condition.flatten(1).any(1) if condition.dim() > 1 else condition
    found = [int(i) for i in hit.nonzero()[:, 0]]
    if not found or (len(found) == hit.numel() and len(found) > limit):
        return "every row" if found else ""
    shown = ", ".join(map(str, found[:limit]))
    return f"row{'s' if len(found) > 1 else ''} {shown}{' …' if len(found) > limit else ''}"


def biggest(tensor: torch.Tensor | None) -> float:
    """Return the largest finite magnitude."""
    if tensor is None or not tensor.numel():
        return 0.0
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else float("inf")


def as_view(made: View | Leaf | None) -> View | None:
    """Return what made a value if an operation did, and nothing for a leaf."""
    return cast("View", made) if hasattr(made, "op") else None


def lineage(view: View, through: frozenset[str] = ELEMENTWISE, depth: int = 12, start: int | None = None) -> Iterator[View]:
    """Yield the operations that made an operation's arguments, following only the given kinds."""
    sources = range(len(view.op.sources)) if start is None else [start]
    todo = [(view.maker(i), 0) for i in sources]
    seen: set[int] = set()
    while todo:
        maker, level = todo.pop(0)
        made = as_view(maker)
        if made is None or made.op.index in seen or level > depth:
            continue
        seen.add(made.op.index)
        yield made
        if made.name in through:
            todo += [(made.maker(i), level + 1) for i in range(len(made.op.sources))]


def skip_views(made: View | Leaf | None) -> View | Leaf | None:
    """Go through views and casts to what really computed a value."""
    while (view := as_view(made)) is not None and view.name in VIEWS and view.op.sources:
        made = view.maker(0)
    return made


def consumers(birth: Birth, view: View) -> Iterator[View]:
    """Yield the forward operations that use an operation's output, through views."""
    from whynan.trace.birth import View as Made

    wanted = {view.op.index}
    for op in birth.graph.ops[view.op.index + 1 :]:
        if op.backward:
            continue
        if any(s.maker in wanted for s in op.sources):
            made = Made(op, birth)
            if made.name in VIEWS:
                wanted.add(op.index)
            yield made


def plus(value: float) -> str:
    """Print a number for a sentence."""
    return number(value)
