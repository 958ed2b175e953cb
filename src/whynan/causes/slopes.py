"""Family 5: the slope of a function at the edge of its domain."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from whynan.causes.arguments import from_spans
from whynan.causes.backward import EDGES, before_clipping, loss_of, parts
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import at_or_below, lies_below, rows, share
from whynan.causes.fixes import Fix, guarded
from whynan.records import number

if TYPE_CHECKING:
    from whynan.trace.birth import Birth, View


def _alive(name: str, dtype: str) -> list[Fix]:
    """Return the changes that keep the gradient of an entry at the edge; a clamp would set it to 0 for good."""
    if name == "pow":
        return [
            Fix("add the logarithms and take exp last: the same loss and the true gradient", "{inner}", safe=True, inner="log of powers by hand"),
            Fix("take the power in log space: the same value and the true gradient", "{inner}", safe=True, inner="powers by hand"),
        ]
    if name == "sqrt":
        sizes = ["1e-4", "1e-2"] if dtype == "float16" else ["1e-6", "1e-3"]  # where the slope is derived again the smaller one leaves a peak
        return [Fix(f"add {eps} inside the root: the slope is finite and the entry can still learn", f"{{x}} + {eps}", 0) for eps in sizes]
    if name == "acosh":
        eps = {"float16": "1e-2", "bfloat16": "1e-1"}.get(dtype, "1e-6")
        return [Fix(f"add {eps} to the argument: the slope is finite and the entry can still learn", f"{{x}} + {eps}", 0)]
    if name == "atan2":
        return [Fix("measure the angle of (1, 0) where both are 0: the same angle, with a finite slope", "{x}.where(({x} != 0) | ({0} != 0), 1.0)", 1)]
    return []


def _gave_nan(birth: Birth) -> bool:
    """Whether the slope itself came out as nan, not as an infinity that met a 0 later."""
    made = birth.view.output() if birth.view is not None else None
    return made is not None and bool(made.isnan().any()) and not bool(made.isinf().any())


@rule("WN501", "infinite-slope", "infinite slope", rank=55)
def infinite_slope(scene: Scene) -> Finding | None:
    """The slope of a function was infinite at the edge of its domain, where its value is finite.

    What happened
    sqrt, a power below 1, acos, asin, acosh, entr or a norm written by hand was evaluated
    exactly at its edge: the distance of two equal points, the root of a probability that
    underflowed to 0. The forward pass and the loss look healthy.

    Why the result is non-finite
    The slope of sqrt at 0 is 1 / 0. The chain rule multiplies it by the slope of what lies
    below, which is 0 for x^2 at 0, and inf * 0 is NaN.

    Example
        >>> gap = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
        >>> loss = torch.sqrt(gap.square().sum(-1)).mean()
        >>> loss.backward()
        >>> loss.item(), gap.grad
        (2.5, tensor([[   nan,    nan],
                [0.3000, 0.4000]]))

    Instead
    torch.linalg.vector_norm and torch.cdist define the slope at 0 as 0 and keep all others.
        >>> gap.grad = None
        >>> loss = torch.linalg.vector_norm(gap, dim=-1).mean()
        >>> loss.backward()
        >>> loss.item(), gap.grad
        (2.5, tensor([[0.0000, 0.0000],
                [0.3000, 0.4000]]))

    For powers of products of probabilities, add logarithms and take exp last: the same loss and
    the true gradient. A clamp is finite and gives the held entries the gradient 0.

    How sure
    whynan checks that the loss is finite, finds the first backward operation with a bad result,
    and counts the arguments of its forward side at the edge. Proven when the step, replayed
    with the change, has finite gradients that are alive; otherwise suspected.

    Not this when
    where, a mask or nan_to_num throws the entry away (WN502), the gradient grew too large
    (WN503), it is eigh or svd (WN504), or the loss is bad as well (family WN1xx).
    """
    found = parts(scene)
    if found is None or not found[0].op or not found[0].op.backward:
        return None
    from whynan.trace.saying import called

    birth, forward = found
    name = forward.name.strip("_")
    argument = forward.input(1 if forward.name == "xlogy" else 0)
    exponent = forward.scalar("exponent")
    power = float(exponent) if isinstance(exponent, int | float) else None
    evidence = []
    empty = False
    label = f"the slope of {called(forward.op)} is {'not a number' if _gave_nan(birth) else 'infinite'} here"
    edge = 1.0 if forward.name in ("acos", "asin", "atanh") else EDGES.get(forward.name)
    if argument is not None and edge is not None:
        at = at_or_below(argument, edge)
        if forward.name in ("acos", "asin", "atanh"):
            at = at_or_below(argument, -edge) | at_or_below(-argument, -edge)
        count = int(at.sum())
        if count:
            empty = count == argument.numel()  # every argument is at the edge: the true gradient may be 0
            beyond = bool((lies_below(argument, edge) if edge != 1.0 or name == "acosh" else argument.abs() > edge).any())
            place = rows(at)
            where = "±1" if edge == 1.0 and name != "acosh" else number(edge)
            there = f"at or {'past' if where == '±1' else 'below'} {where}" if beyond else f"at {where}" if where == "±1" else where
            evidence.append(share(count, argument, f"arguments of {name} are {there}") + (f" ({place})" if place else ""))
            what = f"x^{number(power)}" if forward.name == "pow" and power is not None else name
            after = "and so is the gradient" if scene.symptom.kind == "inf" else "inf * 0 is nan"
            label = f"the slope of {what} at {number(edge)} is infinite{',' if after[0] == 'a' else ';'} {after}"
            label = f"{what} has no finite slope {there}" if beyond else label
    both = _both_zero(forward)
    if both is not None:
        evidence.append(share(int(both.sum()), both, f"pairs of arguments of {name} are 0") + (f" ({rows(both)})" if rows(both) else ""))
        label = f"{name} has no slope where both of its arguments are 0"
    evidence.append(_before_it(scene, birth, forward))
    evidence += before_clipping(scene)
    fixes = [*_alive(forward.name, forward.op.dtype), *guarded(forward.name, forward.op.dtype, power)]
    if forward.name == "sqrt" or (forward.name == "pow" and power == 0.5):
        fixes.insert(0, Fix("use the norm, which defines the slope at 0 as 0", "torch.linalg.vector_norm({inner})", safe=True, inner="sumsq"))
    return Finding(label, evidence, fixes, from_spans(forward), empty=empty)


def _both_zero(forward: View) -> Any:
    """Say where both arguments of hypot are 0; nothing where they never are."""
    left, right = forward.input(0), forward.input(1 if len(forward.op.sources) > 1 else 0)
    if forward.name.strip("_") != "hypot" or left is None or right is None:
        return None
    both = (left == 0) & (right == 0)
    return both if bool(both.any()) else None


def _before_it(scene: Scene, birth: Birth, forward: View) -> str:
    """Say what was finite; the loss is not where a gradient that was taken inside the step goes into it."""
    loss = loss_of(scene, birth)
    if loss is None:
        return "the forward pass is finite"
    result = forward.output()
    hidden = result is not None and not result.isfinite().all()  # log(0) in a mean that exp makes 0 of
    if math.isfinite(loss):
        return f"the loss ({number(loss)}) is finite" if hidden else f"the forward pass and the loss ({number(loss)}) are finite"
    return f"{'' if hidden else 'the values that this gradient is taken of are finite; '}it goes into the loss, which is {number(loss)} by it"
