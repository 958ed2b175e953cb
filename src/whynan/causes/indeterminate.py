"""Family 3: infinities meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.causes.arguments import forward_view, written_spans
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import counted
from whynan.causes.fixes import Fix
from whynan.causes.products import masked_on_the_same_line, next_on_line
from whynan.causes.written import finite_instead
from whynan.records import Phase

if TYPE_CHECKING:
    import torch

    from whynan.trace.birth import View


@rule("WN301", "inf-minus-inf", "infinity minus infinity", rank=41)
def inf_minus_inf(scene: Scene) -> Finding | None:
    """Two infinities were subtracted and gave NaN.

    What happened
    Infinities of the same sign were subtracted, or of opposite sign added or summed. They were
    mostly written on purpose: two masked log-probabilities, points parked at infinity.

    Why the result is non-finite
    inf - inf has no value: it depends on how fast each side grew. A mask of -inf is a good
    argument for softmax and a bad one for a difference.

    Example
        >>> off = torch.tensor([False, False, True])
        >>> raw = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        >>> new = raw.masked_fill(off, -torch.inf).log_softmax(0)
        >>> old = torch.zeros(3).masked_fill(off, -torch.inf).log_softmax(0)
        >>> (new - old).detach()
        tensor([-0.6201,  0.3799,     nan])

    Instead
    Take the masked entries out of both sides before the difference.
        >>> gap = new.masked_fill(off, 0.0) - old.masked_fill(off, 0.0)
        >>> loss = (new.exp() * gap).sum()
        >>> loss.backward()
        >>> loss.detach(), raw.grad
        (tensor(0.1109), tensor([-0.1966,  0.1966,  0.0000]))

    nan_to_num after the difference gives this gradient as well, but hides every other NaN too.
    A large finite number such as -1e4 in the mask avoids the infinity altogether.

    How sure
    whynan counts the places where both sides are infinite and shows the line that wrote the
    infinity. Proven when the step, replayed with the change, is finite with a living gradient;
    otherwise suspected. Which number is meant there no replay shows: where another one gives
    another loss that is said, and where something is chosen by it the change is not proven.

    Not this when
    A whole row of -inf goes into softmax or logsumexp, or its maximum is taken off (WN401), or
    the infinity is an overflow that reaches the loss by itself (WN201, WN203).
    """
    view = forward_view(scene)
    birth = scene.birth
    if view is None or birth is None or birth.derivative:
        return None
    left, right = view.input(0), view.input(1)
    summed = (
        view.name in ("sum", "mean", "cumsum", "logsumexp") and left is not None and bool((left == float("inf")).any()) and bool((left == float("-inf")).any())
    )
    meeting = view.name in ("sub", "add", "rsub", "logaddexp") and left is not None and right is not None
    if meeting and left is not None and right is not None:
        meeting = bool((left.isinf() & right.isinf()).any())
    crossing = _infinities_cross(view)
    if not (meeting or summed or crossing) or not birth.op or not birth.op.damage.nan:
        return None
    output = view.output()
    count = int(output.isnan().sum()) if output is not None else 1
    fixes = [
        Fix("take only a finite number off", "torch.where({x}.isfinite(), {x}, torch.zeros_like({x}))", 1),
        Fix("let places that are infinite on both sides count as 0", _COUNTED.format("0.0"), choice=_COUNTED.format("1.0")),
        Fix("keep both sides finite", _KEPT.format("1e4"), choice=_KEPT.format("2e4")),
        finite_instead(birth),
    ]
    evidence = counted(count, "sums of products hold infinities of both signs") if crossing else f"in {counted(count, 'places')} both sides are infinite"
    return Finding("inf - inf is nan", [evidence], fixes[-1:] if crossing else fixes, written_spans(birth, "the infinity came from here"))


_COUNTED = "torch.where({{0}}.isinf() & {{1}}.isinf(), {}, {{0}} - {{1}})"
_KEPT = "{{0}}.clamp(-1e4, 1e4) - {{1}}.clamp(-{0}, {0})"
_PRODUCTS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "mv": ("self", "vec")}


def _factors(view: View) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return what is multiplied; the first argument of addmm is what is added."""
    names = _PRODUCTS.get(view.name)
    return (view.input(names[0]), view.input(names[1])) if names is not None else (view.input(0), view.input(1))


def _infinities_cross(view: View) -> bool:
    """Whether a matrix product adds up infinities of both signs, and no zero meets an infinity."""
    left, right = _factors(view)
    if view.name not in _PRODUCTS or left is None or right is None:
        return False
    if any(bool(t.isnan().any()) for t in (left, right)) or not any(bool(t.isinf().any()) for t in (left, right)):
        return False
    zero = (left == 0).float() @ right.isinf().float() + left.isinf().float() @ (right == 0).float()
    return not bool(zero.any())


@rule("WN302", "zero-times-inf", "zero times infinity", rank=42)
def zero_times_inf(scene: Scene) -> Finding | None:
    """Zero was multiplied by an infinity and gave NaN instead of 0.

    What happened
    A mask, one-hot target or share of 0 met an infinity in a product: `target * log(p)` for a p
    of 0, `mask * distance` with unreachable entries at inf.

    Why the result is non-finite
    0 * inf is NaN, in the forward pass and in the backward pass. Multiplication does not remove
    an element, it computes with it.

    Example
        >>> share = torch.tensor([1.0, 0.0], requires_grad=True)
        >>> hours = torch.tensor([2.0, float("inf")])
        >>> (share * hours).detach()
        tensor([2., nan])

    Instead
    Select first, so that the infinity never enters the product.
        >>> finite = torch.where(hours.isfinite(), hours, 0.0)
        >>> cost = (share * finite).sum()
        >>> cost.backward()
        >>> cost.item(), share.grad
        (2.0, tensor([2., 0.]))

    Selecting the result keeps the value finite and sends NaN back to the share:
        >>> share.grad = None
        >>> torch.where(share == 0, 0.0, share * hours).sum().backward()
        >>> share.grad
        tensor([2., nan])

    For `target * log(p)` use F.cross_entropy on the logits; the gradient of xlogy at 0 is NaN.

    How sure
    whynan counts the products that became NaN and shows where the infinity was written. Proven
    when the step, replayed with a selection, is finite with a living gradient; otherwise
    suspected.

    Not this when
    Only the gradient is NaN (WN502), the log of 0 or the overflow is on a line of its own, or
    the infinity also stands where the factor is not 0: selecting heals nothing then (WN101,
    WN201). Or the infinity meets another (WN301, WN303).
    """
    view = forward_view(scene)
    birth = scene.birth
    if view is not None and birth is not None and not birth.derivative and view.name in ("log", "log2", "log10", "exp"):
        return masked_on_the_same_line(scene)
    if view is not None and birth is not None and birth.phase is Phase.OPTIMIZER and "mul" in view.name and birth.op and birth.op.damage.nan:
        return Finding(
            "clipping multiplies an infinite gradient by 0",
            ["a gradient was infinite before clipping; so is its norm, and the clipping factor is 0"],
            [Fix("leave the step out when the norm is not finite")],
        )
    if (
        view is None
        or birth is None
        or birth.derivative
        or view.name not in ("mul", "mm", "bmm", "addmm", "dot", "mv", "kl_div", "xlogy", "baddbmm", "addcmul")
    ):
        return None
    written = view.scalar("other") in (float("inf"), float("-inf"))
    if not birth.op or not birth.op.damage.nan or not (written or any(s.damage for s in view.op.sources)):
        return None
    left, right = _factors(view)
    flipped = left is not None and bool(left.isinf().any())
    output = view.output()
    count = int(output.isnan().sum()) if output is not None else 1
    fixes = _selections(right if flipped else left, flipped, number_only=right is None)
    if view.name in _PRODUCTS:
        fixes = [Fix("use a large finite number instead of the infinity, or leave these entries out before the product")]
    return Finding("0 * inf is nan", [counted(count, "products of 0 and an infinity")], fixes, written_spans(birth, "the infinity came from here"))


def _selections(factor: torch.Tensor | None, flipped: bool, number_only: bool) -> list[Fix]:
    """Return the ways to leave an infinity out of a product; only a factor of 0 and 1 may be left out with it."""
    zero, infinite = ("{1}", "{0}") if flipped else ("{0}", "{1}")
    is_mask = number_only or (factor is not None and bool(((factor == 0) | (factor == 1)).all()))
    fixes = [Fix("select with where instead of multiplying by a mask", f"torch.where({zero} == 0, 0.0, {infinite})")] if is_mask else []
    if not number_only:
        chosen = f"torch.where({zero} == 0, torch.zeros_like({infinite}), {infinite})"
        fixes.append(Fix("take the infinity out where the factor is 0, then multiply", f"{zero} * {chosen}"))
        fixes.append(Fix("use a large finite number instead of the infinity", f"{zero} * {infinite}.clamp(-1e9, 1e9)"))
    return fixes


@rule("WN303", "inf-over-inf", "infinity over infinity", rank=43)
def inf_over_inf(scene: Scene) -> Finding | None:
    """An infinity was divided by an infinity and gave NaN.

    What happened
    Numerator and denominator overflowed together in one expression, as in
    `exp(x) / exp(x).sum()` or `exp(x) / (1 + exp(x))`, or infinities written on purpose met.

    Why the result is non-finite
    The true quotient lies between 0 and 1, but both parts are past the range of the dtype and
    inf / inf has no value. With float32 this begins at x = 88.72.

    Example
        >>> x = torch.tensor([100.0, 98.0], requires_grad=True)
        >>> share = torch.exp(x) / torch.exp(x).sum()
        >>> share.detach()
        tensor([nan, nan])

    Instead
    torch.softmax and torch.sigmoid give the same quotient and never form the large number.
        >>> share = torch.softmax(x, 0)
        >>> share[0].backward()
        >>> share.detach(), x.grad
        (tensor([0.8808, 0.1192]), tensor([ 0.1050, -0.1050]))

    By hand, within groups: subtract the maximum of each group before exp.
        >>> e = torch.exp(x - x.max())
        >>> (e / e.sum()).detach()
        tensor([0.8808, 0.1192])

    Clamping x at 80 is finite and wrong: both entries then count the same.
        >>> torch.softmax(x.clamp(max=80), 0).detach()
        tensor([0.5000, 0.5000])

    How sure
    whynan checks that both sides are infinite and shows the largest exponent or a count. Proven
    when the step, replayed with the change, is finite with a living gradient; otherwise
    suspected.

    Not this when
    The overflow is on a line before the division or only one side has it (WN201, WN202, WN203),
    or a row was masked entirely (WN401).
    """
    view = forward_view(scene)
    birth = scene.birth
    if view is None or birth is None or birth.derivative:
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
        [f"numerator and denominator are both infinite in {counted(count, 'places')}"],
        [
            Fix(
                "divide only where the denominator is finite",
                "torch.where({1}.isfinite(), {0}, torch.zeros_like({0})) / torch.where({1}.isfinite(), {1}, torch.ones_like({1}))",
            )
        ],
        written_spans(birth, "the infinity came from here"),
    )


def _exponentials_meet(scene: Scene) -> Finding | None:
    """exp(x) / exp(x).sum() in one expression: the overflow and the quotient are one mistake."""
    division = next_on_line(scene, "div")
    birth = scene.birth
    view = birth.view if birth is not None else None
    if division is None or view is None or not division.op.damage.nan:
        return None
    above, below = division.input("self"), division.input("other")
    if above is None or below is None or not bool(above.isinf().any()) or not bool(below.isinf().any()):
        return None
    argument = view.input(0)
    top = float(argument.real.max()) if argument is not None else float("nan")
    from whynan.causes.ranges import by_hand
    from whynan.records import number

    fixes = [*by_hand("exp"), Fix("keep the exponent at or below 40", "{x}.clamp(max=40)", 0)]
    return Finding(
        "this exponential overflows, and so do both sides of the quotient: inf / inf is nan",
        [f"the largest exponent is {number(top)}; exp overflows {view.op.dtype} past {88.72 if view.op.dtype != 'float16' else 11.09}"],
        fixes,
    )
