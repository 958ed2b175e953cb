"""Family 5: entries that were thrown away, and their gradient is NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from whynan.causes.backward import EDGES, loss_of, ops_of_node, parts
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import SELECTS, as_view, at_or_below, consumers, divides, share, zeros, zeros_and_ones
from whynan.causes.fixes import Fix, guarded
from whynan.causes.logarithms import log_fixes
from whynan.records import number

if TYPE_CHECKING:
    from whynan.trace.birth import Birth, View


_DECIDE = ("gt", "lt", "ge", "le", "ne", "eq", "logical_not", "_to_copy", "bitwise_and", "bitwise_not")  # what makes a mask


@rule("WN502", "branch-not-taken", "NaN from the branch that was not taken", rank=38)
def branch_not_taken(scene: Scene) -> Finding | None:
    """An unselected entry sent NaN back although the forward pass never used it.

    What happened
    A function was computed for all entries, and where, a mask, an index, clamp or nan_to_num
    threw the bad ones away. The loss is finite; the gradient is not.

    Why the result is non-finite
    The entries thrown away get the gradient 0, and it still goes back through the function: 0
    times an infinite or undefined slope is NaN.

    Example
        >>> x = torch.tensor([0.0, 2.0], requires_grad=True)
        >>> loss = torch.where(x > 0, torch.log(x), 0.0).sum()
        >>> loss.backward()
        >>> round(loss.item(), 4), x.grad
        (0.6931, tensor([   nan, 0.5000]))

    Instead
    Make the input safe before the function, and select again after it.
        >>> x.grad, safe = None, torch.where(x > 0, x, 1.0)
        >>> loss = torch.where(x > 0, torch.log(safe), 0.0).sum()
        >>> loss.backward()
        >>> round(loss.item(), 4), x.grad
        (0.6931, tensor([0.0000, 0.5000]))

    A label that is NaN because it is missing is the same trap: (guess - label) ** 2 under a
    where sends 0 * NaN back. Replace the label first.

    Where whole elements are dropped, index before the function: log(x[x > 0]), not
    log(x)[x > 0]. nan_to_num on the result is this trap, not its cure:
        >>> x.grad = None
        >>> torch.nan_to_num(torch.log(x), neginf=0.0).sum().backward()
        >>> x.grad
        tensor([   nan, 0.5000])

    How sure
    whynan checks that the gradient arriving at the function is exactly 0 wherever the result is
    bad, and shows the line that selects. Proven when the step, replayed with a safe input, has
    finite gradients that are alive; otherwise suspected.

    Not this when
    The entry is used and only its slope is infinite (WN501), or the forward product itself is
    0 * inf (WN302).
    """
    found = parts(scene)
    if found is None:
        return None
    birth, forward = found
    assert birth.op is not None
    chosen = _selector(birth, forward)
    if chosen is None:
        return None
    if birth.op.backward:
        grad = _incoming(birth)
        bad = _bad_places(birth)
        if grad is None or bad is None or grad.shape != bad.shape or not bool((grad[bad] == 0).all()):
            return None
    elif not birth.op.damage:
        return None
    name = "div" if divides(forward) else forward.name.strip("_")
    handed = next((i for i, s in enumerate(forward.op.sources) if s.damage.nan), None)
    evidence = [f"{name} feeds {chosen.name}, which does not take the bad entries; their gradient is 0 on the way back"]
    evidence.append("0 times an infinite slope is nan" if handed is None else "0 times nan is nan")
    if handed is None:
        evidence += _at_the_edge(forward, name)
    if (loss := loss_of(scene, birth)) is not None and math.isfinite(loss):
        evidence.append(f"the loss ({number(loss)}) is finite: only the gradient shows this")
    from whynan.capsule.sites import resolve

    spans = [resolve(chosen.site, f"selected here by {chosen.name}")] if chosen.site is not None else []
    fixes = _safe_before(forward, handed)
    sent = "0 * inf = nan" if handed is None else "0 * nan = nan"
    return Finding(f"the entries that are thrown away still send {sent} back", evidence, fixes, [s for s in spans if s.known], backward=True)


def _at_the_edge(forward: View, name: str) -> list[str]:
    """Count the arguments at which an operation has no finite slope."""
    if name == "div":
        below = forward.input(len(forward.op.sources) - 1)
        return [share(zeros(below), below, "denominators are 0")] if below is not None and zeros(below) else []
    argument, edge = forward.input(0), EDGES.get(forward.name)
    count = int(at_or_below(argument, edge).sum()) if argument is not None and edge is not None else 0
    return [share(count, argument, f"arguments of {name} are at or below {number(edge)}")] if argument is not None and edge is not None and count else []


def _safe_before(forward: View, handed: int | None) -> list[Fix]:
    """Return the changes that keep the entries thrown away from being computed with; `handed` is the operand that is NaN already."""
    if handed is not None:
        title = "take the missing values out before they are computed with"
        return [Fix(title, "torch.where({x}.isnan(), torch.zeros_like({x}), {x})", handed, safe=True)]
    if forward.name == "log":
        return log_fixes(forward)
    if divides(forward):
        return [Fix("make the input safe before dividing", "{x}.where({x} != 0, 1.0)", 1), *guarded("div", forward.op.dtype)]
    exponent = forward.scalar("exponent")
    power = float(exponent) if isinstance(exponent, int | float) else None
    inverse = forward.name in ("rsqrt", "reciprocal") or (power is not None and power < 0)
    first = _INVERSE_OF_ZERO if inverse else ()
    return [*first, *(fix for fix in guarded(forward.name, forward.op.dtype, power) if fix.template not in [f.template for f in first])]


def _selector(birth: Birth, forward: View) -> View | None:
    """Return the selecting operation that took the output of a forward operation."""
    from whynan.trace.birth import FOLLOWED

    level = [forward]
    for _ in range(FOLLOWED):
        following: list[View] = []
        for view in level:
            for consumer in list(consumers(birth, view))[:6]:
                takes = consumer.name in _LIMITING and _takes(consumer, view)
                if consumer.name in SELECTS and consumer.name not in _NO_BRANCH and not takes:
                    return consumer
                if consumer.name == "mul" and _multiplies_by_mask(consumer, view):
                    return consumer
                if takes or consumer.name in ("mul", "add", "sub", "neg", "div", "rsub") or _hands_on(consumer):
                    following.append(consumer)
        level = following
    return None


def _takes(consumer: View, view: View) -> bool:
    """Whether a limit lets the bad entries pass as they are: its result is the value that it was given."""
    given = next((consumer.input(i) for i, source in enumerate(consumer.op.sources) if source.maker == view.op.index), None)
    bad, result = _bad_places(consumer.birth), consumer.output()
    if given is None or result is None or bad is None or not given.shape == result.shape == bad.shape:
        return False
    return bool(((given == result) | (given.isnan() & result.isnan()))[bad].all())


def _hands_on(consumer: View) -> bool:
    """Whether an elementwise operation makes bad values of all bad entries: what throws them away comes later."""
    bad, result = _bad_places(consumer.birth), consumer.output()
    return bad is not None and result is not None and result.shape == bad.shape and not bool(result.isfinite()[bad].any())


def _multiplies_by_mask(consumer: View, forward: View) -> bool:
    """Whether a product is with a mask, and one that is 0 at the bad entries where its values are known: a factor of 1 throws nothing away."""
    for index, source in enumerate(consumer.op.sources):
        if source.maker == forward.op.index:
            continue
        maker, values = consumer.maker(index), consumer.input(index)
        made = as_view(maker)
        dtype = made.op.dtype if made is not None else str(getattr(getattr(maker, "tensor", None), "dtype", ""))
        decided = "bool" in dtype or (made is not None and made.name in _DECIDE)
        if decided or (values is not None and zeros_and_ones(values)):
            return values is None or _is_zero_where(values, _bad_places(forward.birth))
    return False


def _is_zero_where(mask: Any, bad: Any) -> bool:
    try:
        return bad is None or not bool((mask.expand(bad.shape) * bad).any())
    except RuntimeError:  # of another shape: the entries were rearranged on the way
        return True


def _incoming(birth: Birth) -> Any:
    """Return the gradient that came into the node of the birth, from the kept values."""
    inside = {op.index for op in ops_of_node(birth)}
    for op in ops_of_node(birth):
        kept = birth.inputs.get(op.index, {})
        for source in op.sources:
            made = birth.graph.ops[source.maker] if source.maker >= 0 else None
            value = kept.get(source.name)
            if made is not None and made.backward and made.index not in inside and value is not None and (value.is_floating_point() or value.is_complex()):
                return value
    return None


def _bad_places(birth: Birth) -> Any:
    assert birth.op is not None
    output = birth.outputs.get(birth.op.index)
    return None if output is None else ~output.isfinite()


_INVERSE_OF_ZERO = (  # the second where the result itself is asked whether it is infinite: so it is 0, and its slope as well
    Fix("make the input safe before the function, and select after it", "{x}.where({x} != 0, 1.0)", 0),
    Fix("put inf in the place of 0: its inverse is the 0 that is selected, and its slope is 0", "{x}.where({x} != 0, float('inf'))", 0),
)
_NO_BRANCH = frozenset({"mul", "select", "slice", "min", "max", "amin", "amax", "sort", "topk"})  # what is picked by size was not meant to be left out
_LIMITING = frozenset({"clamp", "clamp_min", "clamp_max", "minimum", "maximum"})
