"""What the values say of a quotient 0 / 0: that its limit is 1, or that its denominator is 1 - 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.causes.facts import ELEMENTWISE, as_view, is_same, lineage, skip_views
from whynan.causes.fixes import Fix
from whynan.causes.ranges import in_float64
from whynan.records import number

if TYPE_CHECKING:
    import torch

    from whynan.trace.birth import View

_NEAREST = 3  # quotients with the smallest denominators that are looked at
_LEAST = 2
_ALMOST = 0.01  # how near to 1 they are
_OF_ITSELF = ELEMENTWISE | {"sin", "tanh", "expm1", "log1p", "asin", "atan", "sinh", "tan", "hardtanh"}
_AS_ONE = Fix("let a quotient of 0 by 0 be 1, the value of those next to it", "torch.where({1} == 0, 1.0, {0} / {1}.where({1} != 0, 1.0))")
_APART = "keep 1 - x as a number of its own, or make it in float64: next to 1 {} has steps of {} only"


def limit_of_one(view: View) -> tuple[list[Fix], list[str]]:
    """Return the change that gives a quotient its limit where the numerator is made of the denominator and is the same near 0, `x.clamp(max=5) / x`."""
    above, below = view.input(0), view.input(1)
    if above is None or below is None or above.shape != below.shape or below.is_complex() or view.call.endswith("_"):
        return [], []
    used = below != 0
    quotients, sizes = (above[used] / below[used]), below[used].abs()
    nearby = quotients[sizes.argsort()[: max(_NEAREST, len(sizes) // 2)]]
    if len(nearby) < _LEAST or not bool(((nearby[:_NEAREST] - 1).abs() <= _ALMOST).all()) or bool((nearby < 0).any()) or bool(above[~used].any()):
        return [], []
    if not any(is_same(m.maker(i), view.maker(1)) for m in lineage(view, _OF_ITSELF, depth=4, start=0) for i in range(len(m.op.sources))):
        return [], []
    near = f"the quotients by the {len(nearby[:_NEAREST])} smallest, down to {number(float(sizes.min()))}, are 1"
    words = f"the numerator is made of the denominator and is the same next to 0: {near} within {_ALMOST:.0%}"
    return [_AS_ONE], [words]


def one_less_one(view: View, index: int = 1) -> tuple[str, list[str]]:
    """Say that a denominator is 1 - x for an x that is exactly 1 in its type: advice, and evidence."""
    below = view.input(index)
    for made in lineage(view, depth=4, start=index) if below is not None else ():
        x = _taken_from_one(made)
        if x is None or made.output() is None:
            continue
        dtype = x.dtype
        step = number(_step_below_one(dtype))
        named = str(dtype).removeprefix("torch.")
        words = f"the denominator is 1 - 1: x in `1 - x` is exactly 1 in {named}, whose next number below is 1 - {step}"
        return _APART.format(named, step), [f"{words}{_made_of(made)}"]
    return "", []


def _step_below_one(dtype: torch.dtype) -> float:
    import torch

    return torch.finfo(dtype).eps / 2


def _taken_from_one(made: View) -> torch.Tensor | None:
    """Return x where an operation is 1 - x, or x - 1, and x is 1 wherever the result is 0; not of whole numbers, which are counts."""
    if made.name not in ("sub", "rsub"):
        return None
    number_there = made.scalar("other")
    sides = [made.input(i) for i in range(len(made.op.sources))]
    if len(sides) == 1:
        x = sides[0] if number_there in (1, 1.0) else None
    else:
        x = next((x for x, one in (sides, sides[::-1]) if one is not None and bool((one == 1).all())), None)
    if x is None or not x.is_floating_point() or (x.numel() > 1 and bool((x == x.round()).all())):
        return None
    return x if bool((x == 1).any()) else None


def _made_of(made: View) -> str:
    """Say that x was rounded to 1, or that it is a power of what was 1 before."""
    import torch

    step = next((as_view(skip_views(made.maker(i))) for i in range(len(made.op.sources))), None)
    if step is None:
        return ""
    base, exact = step.input(0), in_float64(step)[0]
    if step.name == "pow" and base is not None and bool((base == 1).all()):
        return "; it is a power of a number that is 1 itself"
    off = float((1 - exact).abs().min()) if isinstance(exact, torch.Tensor) and exact.numel() else 0.0
    return f"; in float64 the same {step.name} is off 1 by {number(off)} or more" if off > 0 else ""
