"""Denominators that are a spread: a variance, a standard deviation, a range; also one that is nothing but rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whynan.causes.absurd import finding_of
from whynan.causes.facts import VIEWS, as_view, is_same, lineage, skip_views
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
    result: Any = None  # what it came to, where that was kept
    windows: bool = False  # the values are the two ends of every window of a filter

    def is_gone(self) -> bool:
        """Whether it is 0 somewhere, as far as is known: of several spreads in one denominator not every one is."""
        return self.result is None or bool((self.result == 0).any())

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
        if self.windows:
            return f"{count} of {total} windows {'is' if count == 1 else 'are'} constant"
        kind = ("columns" if self.axes == (0,) else "rows") if self.values.dim() == 2 else "groups"
        along = f"dim {self.axes[0]}" if len(self.axes) == 1 else f"dims {', '.join(map(str, self.axes))}"
        return f"{count} of {total} {kind} {'is' if count == 1 else 'are'} constant along {along}"

    def same_rows(self) -> bool:
        """Whether all rows that the spread is taken over are the same."""
        return 0 in self.axes and not self.windows and bool((self.values == self.values[:1]).all())

    def label(self) -> str:
        """Name the spread where it was computed, with what is the same there."""
        values = self.values
        if values is None or not values.dim():
            return self.what
        if self.same_rows():
            return f"{self.what} of " + (f"{len(values)} identical rows" if len(values) > 1 else f"{values.numel()} identical values")
        words = self.words()
        return f"{self.what}: {words}" if words else self.what


_NAMES = {"var": "the variance", "var_mean": "the variance", "std": "the standard deviation", "std_mean": "the standard deviation", "aminmax": "the range"}
_CENTRES = frozenset({"mean", "nanmean", "median", "nanmedian", "mode", "quantile", "nanquantile", "min", "max", "amin", "amax", "var_mean", "std_mean"})
_POWERS = frozenset({"pow", "mul", "square", "abs", "view", "clone", "_to_copy", "sum", "mean"})
_SCALES = VIEWS | {"mul", "div"}
_SHIFTS = _SCALES | {"add", "sub"}
_PRODUCTS = ("dot", "mm", "bmm")
_FILTERS = ("convolution", "avg_pool1d", "avg_pool2d", "avg_pool3d")
_ADDED_UP = ("sum", "mean", *_PRODUCTS, *_FILTERS)
_ENDS = ("max", "amax")
_TOTALS = ("sum", "mean", "linalg_vector_norm", "norm", *_PRODUCTS, *_ENDS)


def spread_of(view: View, below: int, gone: bool = False) -> Spread | None:
    """Find what spread of which values a denominator is, or is a product, root or sum of; with `gone` one that is 0."""
    first = as_view(view.maker(below))
    read = (_read(made) for made in ([first, *lineage(first, depth=8)] if first is not None else []))
    return next((found for found in read if found is not None and (not gone or found.is_gone())), None)


def _read(made: View) -> Spread | None:
    """Read one operation as a spread, if it is one."""
    if made.name in _NAMES:
        return _along(_NAMES[made.name], made, result=made.output() if made.name != "aminmax" else None)
    if made.name == "sub":
        return _range(made) or _difference(made)
    return _by_hand(made) if made.name in _TOTALS else None


def _along(what: str, reduction: View, values: Any = None, result: Any = None) -> Spread:
    """Return the spread that a reduction is, with the dimensions that it runs over."""
    values = reduction.input(0) if values is None else values
    size = values.dim() if values is not None else 0
    dim = reduction.scalar("dim")
    given = [d for d in (dim if isinstance(dim, list | tuple) else [dim]) if isinstance(d, int)]
    axes = sorted({d % size for d in given if -size <= d < size}) if size else []
    return Spread(what, values, tuple(axes) or tuple(range(size)), result)


def _range(difference: View) -> Spread | None:
    """Read max(x) - min(x)."""
    ends = [as_view(skip_views(difference.maker(i))) for i in range(len(difference.op.sources))]
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return None
    names = {ends[0].name.removeprefix("a"), ends[1].name.removeprefix("a")}
    return _along("the range", ends[0], result=difference.output()) if names == {"max", "min"} and is_same(ends[0].maker(0), ends[1].maker(0)) else None


def _difference(made: View) -> Spread | None:
    """Read E[x^2] - E[x]^2, also with sums and counts; not where values that differ cancelled to 0."""
    left, right = (as_view(skip_views(made.maker(i))) for i in (0, 1))
    of = next((x for step in _scaled(left) if (x := _squares_in(step)) is not None), None)
    total = next((t for step in _scaled(right) if (t := _total_in(step, of)) is not None), None) if of is not None else None
    if total is None:
        return None
    found = _in_windows(total, made.output()) if total.name in _FILTERS else _along("the variance", total, result=made.output())
    return found if found is not None and found.constant()[0] else None


def _scaled(made: View | None) -> list[View]:
    """Return an operation and those that it only scales the results of."""
    return [made, *lineage(made, _SCALES, 4)] if made is not None else []


def _squares_in(step: View) -> View | Leaf | None:
    """Return the values whose squares an operation adds up."""
    if step.name in _PRODUCTS:
        return step.maker(0) if is_same(step.maker(0), step.maker(1)) else None
    inner = as_view(skip_views(step.maker(0))) if step.name in _ADDED_UP else None
    return inner.maker(0) if inner is not None and _is_square(inner) else None


def _is_square(made: View) -> bool:
    if made.name == "mul":
        return len(made.op.sources) == 2 and is_same(made.maker(0), made.maker(1))
    return made.name == "square" or (made.name == "pow" and made.scalar("exponent") == 2)


def _total_in(step: View, of: View | Leaf | None) -> View | None:
    """Return the sum or mean of values that an operation squares, or multiplies with another one of the same values."""
    if not _is_square(step) and not (step.name == "mul" and len(step.op.sources) == 2):
        return None
    sides = [_scaled(as_view(skip_views(step.maker(i)))) for i in range(len(step.op.sources))]
    totals = [next((t for t in side if t.name in _ADDED_UP and is_same(t.maker(0), of)), None) for side in sides]
    return totals[0] if None not in totals else None


def _in_windows(total: View, result: Any) -> Spread | None:
    """Return the spread in the windows of a filter with one channel, each window by its two ends."""
    import torch
    from torch.nn import functional as F

    values, weight, scalars = total.input(0), total.input("weight"), total.op.scalars
    if values is None or (weight is not None and weight.shape[1] != 1):
        return None
    size = list(weight.shape[2:]) if weight is not None else scalars["kernel_size"]
    padding = scalars.get("padding") or [0] * len(size)
    padded = F.pad(values.float(), [p for p in reversed(padding) for _ in range(2)])
    pool: Any = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(size) - 1]
    ends = [sign * pool(sign * padded, size, scalars.get("stride") or size, dilation=scalars.get("dilation") or 1) for sign in (1, -1)]
    return Spread("the variance", torch.stack(ends), (0,), result, windows=True)


def _by_hand(made: View) -> Spread | None:
    """Read what is made of x - mean(x), squared and summed: a variance by hand; sqrt and abs in between are followed."""
    if made.name in _PRODUCTS and not is_same(made.maker(0), made.maker(1)):
        return None  # a covariance
    centred = next((m for m in [made, *lineage(made, _POWERS | VIEWS, 4)] if m.name == "sub"), None)
    centre = as_view(skip_views(centred.maker(1))) if centred is not None and len(centred.op.sources) == 2 else None
    if centred is None or centre is None or centred.input(0) is None:
        return None
    reduction = _centre(centre, centred.maker(0))
    what = "the largest deviation" if made.name in _ENDS else "the variance"
    return None if reduction is None else _along(what, reduction, centred.input(0), made.output())


def _centre(made: View, of: View | Leaf | None) -> View | None:
    """Return the reduction by which an operand is a mean (or median, or end) of the very values it is taken from; nothing where it is none.

    It may be scaled and shifted, but has one number for each group still: what varies in a group is a projection.
    """
    for step in [made, *lineage(made, _SHIFTS, 6)]:
        weighted = step.name == "sum" and (step is not made or getattr(skip_views(step.maker(0)), "name", "") == "mul")
        whole = math.prod(step.op.shape) == math.prod(made.op.shape)
        if (step.name in _CENTRES or weighted) and whole and any(is_same(maker, of) for maker in _makers(step)):
            return step
    return None


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
