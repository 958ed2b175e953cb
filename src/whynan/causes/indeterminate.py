"""Family 3: infinities meet."""

from __future__ import annotations

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.fixes import Fix
from whynan.causes.reductions import _forward_view, written_spans
from whynan.records import Phase


@rule("WN301", "inf-minus-inf", "infinity minus infinity", rank=41)
def inf_minus_inf(scene: Scene) -> Finding | None:
    """Two infinities of the same sign are subtracted, or of opposite sign added."""
    view = _forward_view(scene)
    birth = scene.birth
    if view is None or birth is None or birth.phase is Phase.BACKWARD:
        return None
    left, right = view.input(0), view.input(1)
    summed = view.name in ("sum", "mean", "cumsum", "logsumexp") and left is not None and bool((left == float("inf")).any()) and bool((left == float("-inf")).any())
    meeting = view.name in ("sub", "add", "rsub", "logaddexp") and left is not None and right is not None
    if meeting and left is not None and right is not None:
        meeting = bool((left.isinf() & right.isinf()).any())
    if not (meeting or summed) or not birth.op or not birth.op.damage.nan:
        return None
    output = view.output()
    count = int(output.isnan().sum()) if output is not None else 1
    fixes = [
        Fix("take only a finite number off", "torch.where({x}.isfinite(), {x}, torch.zeros_like({x}))", 1),
        Fix("use a large finite number instead of the infinity"),
    ]
    return Finding("inf - inf is nan", [f"in {count} places both sides are infinite"], fixes, written_spans(birth, "the infinity came from here"))


@rule("WN302", "zero-times-inf", "zero times infinity", rank=42)
def zero_times_inf(scene: Scene) -> Finding | None:
    """A 0, often of a mask, is multiplied with an infinity: the product is NaN, not 0."""
    view = _forward_view(scene)
    birth = scene.birth
    if view is None or birth is None or birth.phase is Phase.BACKWARD or view.name not in ("mul", "mm", "bmm", "addmm", "dot", "mv", "kl_div", "xlogy", "baddbmm", "addcmul"):
        return None
    if not birth.op or not birth.op.damage.nan or not any(s.damage for s in view.op.sources):
        return None
    left, right = view.input(0), view.input(1)
    flipped = left is not None and bool(left.isinf().any())
    number_only = right is None
    zero, infinite = ("{1}", "{0}") if flipped else ("{0}", "{1}")
    output = view.output()
    count = int(output.isnan().sum()) if output is not None else 1
    fixes = [Fix("select with where instead of multiplying by a mask", f"torch.where({zero} == 0, 0.0, {infinite})")]
    if not number_only:
        fixes.append(Fix("select with where instead of multiplying by a mask", f"torch.where({zero} == 0, torch.zeros_like({infinite}), {zero} * {infinite})"))
    return Finding("0 * inf is nan", [f"{count} products of 0 and an infinity"], fixes, written_spans(birth, "the infinity came from here"))


@rule("WN303", "inf-over-inf", "infinity over infinity", rank=43)
def inf_over_inf(scene: Scene) -> Finding | None:
    """An infinity is divided by an infinity."""
    view = _forward_view(scene)
    birth = scene.birth
    if view is None or birth is None or birth.phase is Phase.BACKWARD or view.name != "div":
        return None
    left, right = view.input("self"), view.input("other")
    if left is None or right is None or not bool(left.isinf().any()) or not bool(right.isinf().any()):
        return None
    count = int((left.isinf() & right.isinf()).sum())
    return Finding(
        "inf / inf is nan",
        [f"numerator and denominator are both infinite in {count} places"],
        [Fix("divide only where the denominator is finite", "torch.where({1}.isfinite(), {0}, torch.zeros_like({0})) / torch.where({1}.isfinite(), {1}, torch.ones_like({1}))")],
        written_spans(birth, "the infinity came from here"),
    )
