"""Denominators that are a spread: a variance, a standard deviation, a range; also one that is nothing but rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whynan.causes.absurd import finding_of
from whynan.causes.facts import as_view, is_same, lineage, skip_views
from whynan.causes.fixes import Fix
from whynan.causes.handed import constant_ids
from whynan.causes.usual import usual
from whynan.records import Span, number

if TYPE_CHECKING:
    from whynan.causes.catalogue import Finding, Scene
    from whynan.trace.birth import View
    from whynan.trace.graph import Leaf

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


@dataclass(frozen=True, slots=True)
class Spread:
    """What kind of spread a denominator is, of which values, along which of their dimensions."""

    what: str
    values: Any
    axes: tuple[int, ...] = ()

    def constant(self) -> tuple[int, int]:
        """Count the groups along the reduced dimensions that hold one value only, and all groups."""
        values, axes = self.values, self.axes
        if values is None or not values.dim() or not values.numel():
            return 0, 0
        first = values
        for axis in axes:
            first = first.narrow(axis, 0, 1)
        same = (values == first).movedim(axes, tuple(range(len(axes)))).flatten(0, len(axes) - 1).all(0)
        return int(same.sum()), same.numel()

    def words(self) -> str:
        """Say which groups have no spread: `1 of 4 rows is constant along dim 1`; nothing where none is constant or there is one only."""
        count, total = self.constant()
        if not count or total < 2:
            return ""
        kind = ("columns" if self.axes == (0,) else "rows") if self.values.dim() == 2 else "groups"
        along = f"dim {self.axes[0]}" if len(self.axes) == 1 else f"dims {', '.join(map(str, self.axes))}"
        return f"{count} of {total} {kind} {'is' if count == 1 else 'are'} constant along {along}"

    def label(self) -> str:
        """Name the spread where it was computed, with what is the same there."""
        values = self.values
        if values is None or not values.dim():
            return self.what
        if 0 in self.axes and bool((values == values[:1]).all()):
            return f"{self.what} of {len(values)} identical rows"
        words = self.words()
        return f"{self.what}: {words}" if words else self.what


_CENTRES = frozenset({"mean", "nanmean", "median", "nanmedian", "mode", "quantile", "nanquantile", "min", "max", "amin", "amax", "var_mean", "std_mean"})
_POWERS = frozenset({"pow", "mul", "square", "abs", "view", "clone", "_to_copy", "sum", "mean"})
_TOTALS = ("sum", "mean", "linalg_vector_norm", "norm", "pow", "mul", "square", "abs")


def spread_of(view: View, below: int) -> Spread | None:
    """Find what spread of which values a denominator is."""
    first = as_view(view.maker(below))
    for made in [first, *lineage(first, depth=8)] if first is not None else []:
        if made.name in ("var", "var_mean"):
            return _along("the variance", made)
        if made.name in ("std", "std_mean"):
            return _along("the standard deviation", made)
        if made.name == "aminmax":
            return _along("the range", made)
        found = _range(made) if made.name == "sub" else _by_hand(made) if made.name in _TOTALS else None
        if found is not None:
            return found
    return None


def _along(what: str, reduction: View, values: Any = None) -> Spread:
    """Return the spread that a reduction is, with the dimensions that it runs over."""
    values = reduction.input(0) if values is None else values
    size = values.dim() if values is not None else 0
    dim = reduction.scalar("dim")
    given = [d for d in (dim if isinstance(dim, list | tuple) else [dim]) if isinstance(d, int)]
    axes = sorted({d % size for d in given if -size <= d < size}) if size else []
    return Spread(what, values, tuple(axes) or tuple(range(size)))


def _range(difference: View) -> Spread | None:
    """Read max(x) - min(x)."""
    ends = [as_view(skip_views(difference.maker(i))) for i in range(len(difference.op.sources))]
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return None
    names = {ends[0].name.removeprefix("a"), ends[1].name.removeprefix("a")}
    return _along("the range", ends[0]) if names == {"max", "min"} and is_same(ends[0].maker(0), ends[1].maker(0)) else None


def _by_hand(made: View) -> Spread | None:
    """Read what is made of x - mean(x), squared and summed: a variance by hand; sqrt and abs in between are followed."""
    centred = next((m for m in [made, *lineage(made, _POWERS, 4)] if m.name == "sub"), None)
    centre = as_view(skip_views(centred.maker(1))) if centred is not None and len(centred.op.sources) == 2 else None
    if centred is None or centre is None or centred.input(0) is None:
        return None
    reduction = _centre(centre, centred.maker(0))
    return None if reduction is None else _along("the variance", reduction, centred.input(0))


def _centre(made: View, of: View | Leaf | None) -> View | None:
    """Return the reduction by which an operand is a mean (or median, or end) of the very values it is taken from; nothing where it is none."""
    scaled = made.name == "div" or (made.name == "mul" and len(made.op.sources) == 1)  # by a count; times a vector it is a projection
    step = as_view(skip_views(made.maker(0))) if scaled else made
    if step is None:
        return None
    weighted = step.name == "sum" and (scaled or getattr(skip_views(step.maker(0)), "name", "") == "mul")
    return step if (step.name in _CENTRES or weighted) and any(is_same(maker, of) for maker in _makers(step)) else None


def _makers(reduction: View) -> list[View | Leaf | None]:
    """What a reduction is made of, through elementwise operations: `(w * x).sum()` is made of w and of x."""
    steps = [reduction, *lineage(reduction, depth=4)]
    return [step.maker(i) for step in steps for i in range(len(step.op.sources))]


def rounding_spread(scene: Scene) -> Finding | None:
    """For a spike: a division by the spread of rows that differ by rounding alone."""
    view = scene.birth.forward if scene.birth is not None else None
    found = spread_of(view, 1) if view is not None and view.name == "div" else None
    if view is None or found is None or found.values is None or not _alike(found.values):
        return None
    what, values = found.what, found.values
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
