"""Family 1, quotients: the denominator is 0."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from whynan.causes.arguments import computed_forward, from_spans
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import ELEMENTWISE, are_counts, as_view, counted, divides, is_same, lies_below, lineage, rows, share, skip_views
from whynan.causes.fixes import SOFTMAX, Fix, as_zero, guarded, shifted, small
from whynan.causes.ratios import limit_of_one, one_less_one
from whynan.causes.usual import before, kept_above
from whynan.records import Phase

if TYPE_CHECKING:
    from whynan.trace.birth import View

_NORMS = ("linalg_vector_norm", "norm", "linalg_norm")


@rule("WN104", "zero-over-zero", "zero over zero", rank=62)
def zero_over_zero(scene: Scene) -> Finding | None:
    """Zero was divided by zero and gave NaN.

    What happened
    Numerator and denominator were 0 in the same place: a zero vector over its own norm, a Dice
    or IoU score of two empty masks, a weight row of zeros under weight_norm.

    Why the result is non-finite
    0 / 0 has no value, so it is NaN; so are the gradients of both sides. One such element makes
    every sum it enters NaN.

    Example
        >>> v = torch.zeros(3, requires_grad=True)
        >>> unit = v / v.norm()
        >>> unit.sum().backward()
        >>> unit.detach(), v.grad
        (tensor([nan, nan, nan]), tensor([nan, nan, nan]))

    Instead
    Put a number of ordinary size inside the root, or a smoothing term on both sides of a ratio.
        >>> v = torch.zeros(3, requires_grad=True)
        >>> unit = v / (v.square().sum() + 1e-4).sqrt()
        >>> unit.sum().backward()
        >>> unit.detach(), v.grad
        (tensor([0., 0., 0.]), tensor([100., 100., 100.]))

    The gradient at 0 is 1 / guard: with the default eps of F.normalize it is finite and absurd.
        >>> v.grad = None
        >>> F.normalize(v, dim=0).sum().backward()
        >>> v.grad
        tensor([1.0000e+12, 1.0000e+12, 1.0000e+12])

    How sure
    whynan counts the places where both sides are 0 and says whether the denominator is a norm.
    Proven when the step, replayed with the change, is finite with a living gradient and a loss
    of the usual size; otherwise suspected.

    Not this when
    The denominator is the sum of a mask (WN402) or the spread of identical values (WN404), the
    eps that was there rounded to 0 (WN204), or most numerators are not 0 and those infinities
    reach the loss (WN103).
    """
    view = computed_forward(scene)
    if view is None:
        return None
    if view.name in ("_weight_norm", "_weight_norm_interface", "renorm"):
        return Finding("a zero weight row is divided by its own norm", ["the norm of a weight row is 0"], [Fix("initialise the weights with non-zero rows")])
    if view.name not in ("div", "cosine_similarity"):
        return None
    above, below, scalar = view.input("self"), view.input("other"), view.scalar("other")
    if below is None and scalar in (0, 0.0) and above is not None:
        return None if not bool((above == 0).any()) else Finding("0 / 0 is nan", ["the divisor is the number 0"], [_floor(scalar)])
    if above is None or below is None:
        return None
    hit = (above == 0) & (below == 0)
    count = int(hit.sum())
    mostly = 2 * count > int((hit | (below == 0)).sum())
    if not count or not (mostly or _only_nans_go_on(view)):  # something else is divided by 0
        return None
    norm = _norm_below(view)
    evidence = [share(int((below == 0).sum()), below, "denominators are 0"), _both(count, hit)]
    limit, words = limit_of_one(view) if mostly else ([], [])
    apart, why = one_less_one(view)
    evidence += [*words, *why]
    if norm is not None:
        evidence.append("the denominator is a norm: the vector is zero")
    if not mostly:
        evidence.append("the infinite quotients beside them become finite right after: only 0 / 0 reaches the loss")
    floor = Fix("keep the denominator away from 0", f"{{x}}.clamp_min({small(view.op.dtype)})", 1)
    # 0 over a tiny number is 0 as well, but of the next numerator that is not 0 it makes 1e12, and so it does of the gradient
    fixes = [*_normalised(view), *limit, as_zero(view), floor] if mostly else [floor, as_zero(view)]
    fixes += guarded("div", view.op.dtype)[1:]
    if view.call.endswith("normalize"):
        eps = "1e-4" if view.op.dtype == "float16" else "1e-12"
        fixes = [Fix(f"give normalize an eps: {eps}", eps, keyword="eps")]
    return Finding(
        "0 / 0 is nan" + (": a zero vector over its own norm" if norm is not None and is_same(norm.maker(0), view.maker(0)) else ""),
        evidence,
        fixes,
        from_spans(view, 1),
        empty=scene.birth is not None and scene.birth.phase is Phase.OPTIMIZER and not apart,
        advice=apart,
    )


def _both(count: int, hit: Any) -> str:
    """Count the quotients that are 0 / 0; where that is all of many, say it of both sides."""
    if count == hit.numel() > 1:
        return f"all {count} quotients are 0 / 0: numerator and denominator are 0 in every element"
    return counted(count, "quotients are 0 / 0")


def _only_nans_go_on(view: View) -> bool:
    """Whether what takes the quotients makes finite values of the infinite ones, `atan(x / 0)`: then 0 / 0 alone reaches the loss."""
    quotients = view.output()
    if quotients is None or not bool(quotients.isinf().any()):
        return False
    for taker in view.birth.path()[1:]:
        made = taker.output()
        if made is None or made.shape != quotients.shape:
            return False
        left = made[quotients.isinf()]
        if bool(left.isfinite().all()):
            return bool(made[quotients.isnan()].isnan().all())
        if not bool(left.isinf().all()):
            return False
    return False


def _normalised(view: View) -> list[Fix]:
    """Where exponentials that all underflowed are divided by their sum, a common factor cancels: the largest exponent can be taken out first."""
    top, total = as_view(skip_views(view.maker(0))), as_view(skip_views(view.maker(1)))
    if top is None or top.name != "exp" or total is None or total.name != "sum":
        return []
    return [SOFTMAX, *(replace(fix, site=top.site) for fix in shifted(total) if top.site is not None and is_same(top, total.maker(0)))]


def _norm_below(view: View) -> View | None:
    """Return the norm that a denominator is; one that is added to something else is a part of it only."""
    return next((m for m in lineage(view, ELEMENTWISE - {"add", "sub", "rsub"}, depth=4, start=1) if m.name in _NORMS), None)


def _floor(divisor: object) -> Fix:
    """Keep a number away from 0; a whole number is a count, and 1e-6 is none."""
    return Fix("count at least 1", "max({x}, 1)", 1) if isinstance(divisor, int) else Fix("keep the divisor away from 0", "max({x}, 1e-6)", 1)


@rule("WN103", "division-by-zero", "division by zero", rank=63)
def division_by_zero(scene: Scene) -> Finding | None:
    """A number that is not 0 was divided by 0 and gave an infinity.

    What happened
    A denominator held exact zeros: a weight, propensity, width, temperature or norm that is 0
    for some elements while the numerator is not.

    Why the result is non-finite
    x / 0 is inf with the sign of x. The gradient of the numerator is 1 / 0, that of the
    denominator -x / 0^2; both are infinite too.

    Example
        >>> reward = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> share = torch.tensor([0.0, 4.0])
        >>> value = reward / share
        >>> value.sum().backward()
        >>> value.detach(), reward.grad
        (tensor([   inf, 0.5000]), tensor([   inf, 0.2500]))

    Instead
    Decide what an element without a denominator counts, and divide only where there is one.
        >>> reward = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> safe = torch.where(share == 0, 1.0, share)
        >>> value = torch.where(share == 0, reward * 0, reward / safe)
        >>> value.sum().backward()
        >>> value.detach(), reward.grad
        (tensor([0.0000, 0.5000]), tensor([0.0000, 0.2500]))

    A tiny eps only moves the blow-up: the value is finite and absurd, and so is its gradient.
        >>> (reward / (share + 1e-8)).detach()
        tensor([1.0000e+08, 5.0000e-01])

    How sure
    whynan counts the zeros in the denominator and names their rows. Proven when the step,
    replayed with the change, is finite, its gradient is alive and its loss has the size of the
    steps before; a loss 1000 times larger does not count. Otherwise suspected.

    Not this when
    The numerator is 0 as well (WN104), the denominator counts a mask (WN402) or is the spread
    of identical values (WN404), or the division is written as rsqrt, reciprocal or a power
    (WN106).
    """
    view = computed_forward(scene)
    if view is None or not (divides(view) or view.name in ("addcdiv", "floor_divide")):
        return None
    below = view.input({"addcdiv": "tensor2", "reciprocal": "self"}.get(view.name, "other"))
    if below is None:
        divisor = view.scalar("other")
        return Finding("division by the number 0", ["the divisor is the number 0"], [_floor(divisor)]) if divisor in (0, 0.0) else None
    count = int((below == 0).sum())
    if not count:
        return None
    place = rows(below == 0)
    apart, why = one_less_one(view, len(view.op.sources) - 1)
    evidence = [share(count, below, "denominators are 0") + (f" ({place})" if place else ""), *why]
    fixes = [as_zero(view), *guarded("div", view.op.dtype)[1:]]
    if view.name == "reciprocal":
        fixes = [fixes[0], Fix("keep the denominator away from 0", "torch.where({x} == 0, torch.full_like({x}, 1e-6), {x})", 1)]
    elif view.name == "div" and view.site is not None and not below.is_complex() and not bool((below < 0).any()):
        limit = [] if view.op.backward else [_LIMIT]  # no backward pass of the program's own makes a difference to the loss
        fixes = [*limit, *fixes, *kept_above(before(scene, "div", 1, view.site), 1)]
    return Finding(
        f"division by 0: {share(count, below, 'denominators are 0')}",
        evidence,
        fixes,
        from_spans(view, len(view.op.sources) - 1),
        empty=scene.birth is not None and scene.birth.phase is Phase.OPTIMIZER,  # gradients of 0 have a norm of 0
        advice=apart,
    )


# an infinite quotient may be divided by again, or saturate: then the step has a limit, and to let the quotient be 0 would be its opposite
_LIMIT = Fix("keep the denominator away from 0; how far makes no difference to the loss", "{x}.clamp_min(1e-12)", 1, limit="{x}.clamp_min(1e-6)")


@rule("WN106", "negative-power-of-zero", "negative power of zero", rank=64)
def negative_power_of_zero(scene: Scene) -> Finding | None:
    """Zero was raised to a negative power and gave an infinity.

    What happened
    rsqrt, reciprocal or pow with a negative exponent got an exact 0: an RMS norm without eps on
    a row of zeros, inverse distance weights of a point with itself, `deg ** -0.5` of a node
    without neighbours.

    Why the result is non-finite
    0 ** -n is 1 / 0, which is inf. Multiplied by the same zero row it is 0 * inf, which is NaN.

    Example
        >>> x = torch.zeros(1, 4, requires_grad=True)
        >>> out = x * torch.rsqrt(x.square().mean(-1, keepdim=True))
        >>> out.sum().backward()
        >>> out.detach(), x.grad
        (tensor([[nan, nan, nan, nan]]), tensor([[nan, nan, nan, nan]]))

    Instead
    Add the eps inside the root, where it bounds the slope as well.
        >>> x = torch.zeros(1, 4, requires_grad=True)
        >>> out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        >>> out.sum().backward()
        >>> out.detach(), x.grad.round()
        (tensor([[0., 0., 0., 0.]]), tensor([[1000., 1000., 1000., 1000.]]))

    A count of 0 has no share at all: let it give 0, which is what 1 / inf is.
        >>> degree = torch.tensor([4.0, 0.0])
        >>> degree.where(degree != 0, float("inf")) ** -0.5
        tensor([0.5000, 0.0000])

    An eps outside the root guards the value only: the slope of the root stays infinite.
        >>> x.grad = None
        >>> (x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-6)).sum().backward()
        >>> x.grad
        tensor([[nan, nan, nan, nan]])

    How sure
    whynan counts the zeros in the base and reads the exponent. Proven when the step, replayed
    with the guard, is finite with a living gradient; otherwise suspected.

    Not this when
    The base is negative (WN105), the division is written with a slash (WN103, WN104), the base
    is the spread of identical values (WN404), or an eps was there and rounded to 0 (WN204).
    """
    view = computed_forward(scene)
    if view is None or view.name not in ("rsqrt", "reciprocal", "pow", "float_power"):
        return None
    base, exponent = view.input("self"), view.scalar("exponent")
    if base is None or not bool((base == 0).any()) or (view.name == "rsqrt" and bool(lies_below(base, 0).any())):
        return None
    if view.name in ("pow", "float_power"):
        powers = view.input("exponent")
        if powers is None and not (isinstance(exponent, int | float) and exponent < 0):
            return None
        if powers is not None and not bool(lies_below(powers.real, 0).any()):
            return None
    count = int((base == 0).sum())
    power = float(exponent) if isinstance(exponent, int | float) else -1.0
    fixes = guarded(view.name.replace("float_power", "pow"), view.op.dtype, power)
    return Finding(
        f"{view.name}(0) is inf: {share(count, base, 'values are 0')}",
        [share(count, base, "values are 0"), *(["they are whole numbers: a count"] if (counts := are_counts(view, 0)) else [])],
        [_NO_SHARE, *fixes] if counts else fixes,
        from_spans(view),
    )


# a node without neighbours has no share in a sum over them: 1e-6 in the place of its degree would give it the largest of all
_NO_SHARE = Fix("let a count of 0 give 0: 1 / inf is 0", "{x}.where({x} != 0, float('inf'))", 0)
