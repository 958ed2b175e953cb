"""Denominators that are a spread: a variance, a standard deviation, a range; also one that is nothing but rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whynan.causes.absurd import finding_of
from whynan.causes.facts import as_view, lineage, skip_views
from whynan.causes.fixes import Fix
from whynan.causes.handed import constant_ids
from whynan.causes.usual import usual
from whynan.records import Span, number

if TYPE_CHECKING:
    from whynan.causes.catalogue import Finding, Scene
    from whynan.trace.birth import View

_ROUNDINGS = 64  # units in the last place by which equal rows may differ


def usual_spread(value: float, among: int) -> Fix:
    """Divide by what the spread usually is; far below it there is none. A running mean of it would do the same."""
    size = float(f"{value:.2g}")
    title = f"where there is no spread divide by the usual one, {number(size)} (median of {among}), or by a running mean of it"
    return Fix(title, f"{{0}} / {{1}}.where({{1}} > {size * 1e-6:.2g}, {size!r})")


def made_at(view: View, index: int, label: str) -> list[Span]:
    """The line where a denominator was computed, if it is another."""
    from whynan.capsule.sites import resolve

    made = as_view(skip_views(view.maker(index)))
    span = resolve(made.site, label) if made is not None and not made.op.backward else Span("", 0)
    here = resolve(view.site)
    return [span] if span.known and (span.file, span.line) != (here.file, here.line) else []


def spread_of(view: View, below: int) -> tuple[str, Any] | None:
    """Find what spread of which values a denominator is."""
    first = as_view(view.maker(below))
    if first is None:
        return None
    for made in [first, *lineage(first, depth=8)]:
        if made.name in ("var", "var_mean"):
            return "the variance", made.input("self")
        if made.name in ("std", "std_mean"):
            return "the standard deviation", made.input("self")
        if made.name == "sub":
            names = [getattr(skip_views(made.maker(i)), "name", "") for i in range(len(made.op.sources))]
            if {"max", "amax"} & set(names) and {"min", "amin"} & set(names):
                return "the range", skip_views(made.maker(0)).input(0)  # type: ignore[union-attr]
            # x - mean(x), squared and summed: a variance by hand; sqrt/abs in between are followed
        if made.name in ("sum", "mean", "linalg_vector_norm", "norm", "pow", "mul", "square", "abs"):
            centred = next(
                (
                    m
                    for m in [made, *lineage(made, frozenset({"pow", "mul", "square", "abs", "view", "clone", "_to_copy", "sum", "mean"}), 4)]
                    if m.name == "sub"
                ),
                None,
            )
            if centred is not None:
                right = skip_views(centred.maker(1))
                left = centred.input(0)
                if getattr(right, "name", "") in ("mean", "sum", "div", "select", "median") and left is not None:
                    return "the variance", left
        if made.name == "aminmax":
            return "the range", made.input("self")
    return None


def rounding_spread(scene: Scene) -> Finding | None:
    """For a spike: a division by the spread of rows that differ by rounding alone."""
    view = scene.birth.forward if scene.birth is not None else None
    found = spread_of(view, 1) if view is not None and view.name == "div" else None
    if view is None or found is None or found[1] is None or not _alike(found[1]):
        return None
    what, values = found
    below = view.input(1)
    size = number(float(below.abs().min())) if below is not None else "0"
    finding = finding_of(scene, f"{what} of equal rows is rounding alone: {size}")
    finding.evidence += [f"{len(values)} rows, 1 unique up to rounding", *constant_ids(scene.program)]
    finding.spans = made_at(view, 1, f"{what} of {len(values)} rows that are equal up to rounding")
    known = usual(scene, "div", 1, view.site)
    if known is not None:
        finding.fixes = [usual_spread(*known)]
    return finding


def _alike(values: Any) -> bool:
    """Whether all rows are the same up to rounding."""
    import torch

    if values.dim() < 1 or len(values) < 2 or not values.is_floating_point():
        return False
    apart = (values - values[:1]).abs().max()
    return bool(apart <= _ROUNDINGS * torch.finfo(values.dtype).eps * values.abs().max())
