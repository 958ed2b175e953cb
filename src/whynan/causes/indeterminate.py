"""Family 3: infinities meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import skip_views
from whynan.causes.fixes import Fix, guarded
from whynan.causes.reductions import _forward_view, written_spans
from whynan.records import Phase

if TYPE_CHECKING:
    from whynan.trace.birth import View


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
        Fix("let places that are infinite on both sides count as 0", "torch.where({0}.isinf() & {1}.isinf(), 0.0, {0} - {1})"),
        Fix("keep both sides finite", "{0}.clamp(-1e4, 1e4) - {1}.clamp(-1e4, 1e4)"),
        Fix("use a large finite number instead of the infinity"),
    ]
    return Finding("inf - inf is nan", [f"in {count} places both sides are infinite"], fixes, written_spans(birth, "the infinity came from here"))


@rule("WN302", "zero-times-inf", "zero times infinity", rank=42)
def zero_times_inf(scene: Scene) -> Finding | None:
    """A 0, often of a mask, is multiplied with an infinity: the product is NaN, not 0."""
    view = _forward_view(scene)
    birth = scene.birth
    if view is not None and birth is not None and birth.phase is not Phase.BACKWARD and view.name in ("log", "log2", "log10", "exp"):
        return _masked_on_the_same_line(scene)
    if view is None or birth is None or birth.phase is Phase.BACKWARD or view.name not in ("mul", "mm", "bmm", "addmm", "dot", "mv", "kl_div", "xlogy", "baddbmm", "addcmul"):
        return None
    written = view.scalar("other") in (float("inf"), float("-inf"))
    if not birth.op or not birth.op.damage.nan or not (written or any(s.damage for s in view.op.sources)):
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
        fixes.append(Fix("use a large finite number instead of the infinity", f"{zero} * {infinite}.clamp(-1e9, 1e9)"))
    return Finding("0 * inf is nan", [f"{count} products of 0 and an infinity"], fixes, written_spans(birth, "the infinity came from here"))


@rule("WN303", "inf-over-inf", "infinity over infinity", rank=43)
def inf_over_inf(scene: Scene) -> Finding | None:
    """An infinity is divided by an infinity."""
    view = _forward_view(scene)
    birth = scene.birth
    if view is None or birth is None or birth.phase is Phase.BACKWARD:
        return None
    if view.name == "exp":
        return _exponentials_meet(scene)
    if view.name != "div":
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


def _next_on_line(scene: Scene, name: str) -> View | None:
    """Return the first operation of that name on the way to the symptom, if it stands on the line of the birth."""
    from whynan.capsule.sites import positions

    birth = scene.birth
    assert birth is not None
    path = birth.path()
    here = path[0].site if path else None
    for view in path[1:6]:
        if view.name == name and here is not None and view.site is not None:
            same = view.site.code is here.code and positions(view.site)[0] == positions(here)[0]
            return view if same else None
    return None


def _exponentials_meet(scene: Scene) -> Finding | None:
    """exp(x) / exp(x).sum() in one expression: the overflow and the quotient are one mistake."""
    division = _next_on_line(scene, "div")
    birth = scene.birth
    view = birth.view if birth is not None else None
    if division is None or view is None or not division.op.damage.nan:
        return None
    above, below = division.input("self"), division.input("other")
    if above is None or below is None or not bool(above.isinf().any()) or not bool(below.isinf().any()):
        return None
    argument = view.input(0)
    top = float(argument.max()) if argument is not None else float("nan")
    from whynan.causes.ranges import _by_hand
    from whynan.records import number

    fixes = [*_by_hand("exp"), Fix("keep the exponent at or below 40", "{x}.clamp(max=40)", 0)]
    return Finding("inf / inf is nan: both exponentials overflow", [f"the largest exponent is {number(top)}; exp overflows {view.op.dtype} past {88.72 if view.op.dtype != 'float16' else 11.09}"], fixes)


def _masked_on_the_same_line(scene: Scene) -> Finding | None:
    """target * log(p) in one expression, with a target of 0 wherever p is 0."""
    product = _next_on_line(scene, "mul")
    birth = scene.birth
    view = birth.view if birth is not None else None
    if product is None or view is None or not product.op.damage.nan or product.op.damage.posinf or product.op.damage.neginf:
        return None
    factors = [(i, t) for i, t in enumerate((product.input(0), product.input(1))) if t is not None and not bool(t.isinf().any())]
    if len(factors) != 1 or not bool((factors[0][1] == 0).any()):
        return None
    made = skip_views(product.maker(factors[0][0]))
    inside = skip_views(view.maker(0))
    both = getattr(made, "op", None), getattr(inside, "op", None)
    if None not in both and both[0] is both[1] or (both[0] is not None and both[0].node >= 0):
        return None  # the zero was computed with gradients: p * log(p) is the logarithm's own fault
    count = int((factors[0][1] == 0).sum())
    fixes = guarded(view.name, view.op.dtype)
    return Finding(f"0 * inf is nan: {view.name} is infinite where the factor is 0", [f"{count} factors are 0", "multiplying by 0 does not remove an infinity"], fixes)
