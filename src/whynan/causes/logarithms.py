"""Family 1, logarithms: the argument is 0 or below."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from whynan.causes import patterns
from whynan.causes.arguments import argument_of, computed_forward, from_spans, rounded_from
from whynan.causes.carried_out import told_of_trained
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import ELEMENTWISE, as_view, is_same, lies_below, lineage, rows, share, skip_views, without_zeros
from whynan.causes.fixes import BY_HAND, LOG1MEXP, LOG_OF_EXP, LOGSUMEXP, Fix, guarded, small
from whynan.causes.spreads import spread_of
from whynan.records import number

if TYPE_CHECKING:
    from whynan.trace.birth import View
    from whynan.trace.graph import Leaf


_LOGS = {
    "log": 0.0,
    "log2": 0.0,
    "log10": 0.0,
    "log1p": -1.0,
    "xlogy": 0.0,
    "special_xlogy": 0.0,
    "special_entr": 0.0,
    "special_xlog1py": -1.0,
    "special_log_ndtr": 0.0,
}


_BASES = {"log": 1.0, "log2": math.log(2), "log10": math.log(10)}


@rule("WN101", "log-of-zero", "log of an exact zero", rank=60)
def log_of_zero(scene: Scene) -> Finding | None:
    """A logarithm got an exact 0 and gave -inf, with an infinite slope.

    What happened
    log, log2, log10, xlogy or log1p (at -1) met an argument that lies exactly on the edge of
    its domain. The zero is often a probability: a softmax or sigmoid that rounded to 0, `1 - p`
    where p rounded to 1, a relu, an empty bin of a histogram or spectrum.

    Why the result is non-finite
    log(0) is -inf and its slope 1/x is inf. In a mean the -inf is the loss; on the way back inf
    meets the 0 slope of the saturated softmax, and inf * 0 is NaN.

    Example
        >>> x = torch.tensor([0.0, 200.0], requires_grad=True)
        >>> loss = -torch.log(torch.softmax(x, 0))[0]
        >>> loss.backward()
        >>> loss.item(), x.grad
        (inf, tensor([nan, nan]))

    Instead
    Take the logarithm before anything can round: log_softmax, logsigmoid, cross_entropy.
        >>> x = torch.tensor([0.0, 200.0], requires_grad=True)
        >>> loss = -torch.log_softmax(x, 0)[0]
        >>> loss.backward()
        >>> loss.item(), x.grad
        (200.0, tensor([-1.,  1.]))

    A clamp is finite too, but the entries it holds learn nothing: their gradient is 0.
        >>> x.grad = None
        >>> (-torch.log(torch.softmax(x, 0).clamp_min(1e-12))[0]).backward()
        >>> x.grad
        tensor([0., 0.])

    How sure
    whynan counts the arguments that are exactly 0 and names the softmax, sigmoid, tanh or relu
    that made them. Proven when the replayed step with the change has a finite loss and a
    finite, living gradient; otherwise suspected.

    Not this when
    Arguments lie below 0 (WN102), a target or mask of 0 multiplies the -inf on the same line
    (WN302), a guard rounded away (WN204), or only the gradient is bad (WN501, WN502).
    """
    view = computed_forward(scene)
    if view is None or view.name not in _LOGS:
        return None
    argument, index = argument_of(view)
    edge = _LOGS[view.name]
    if argument is None or bool(lies_below(argument, edge).any()):
        return None
    hit = argument == edge
    count = int(hit.sum())
    if not count:
        return None
    origin = rounded_from(view)
    name = "log" if view.name == "xlogy" else view.name.removeprefix("special_")
    place = rows(hit)
    evidence = [share(count, argument, f"values are {number(edge)}") + (f" ({place})" if place else "")]
    if origin:
        evidence.append(f"the {number(edge)} comes from {origin}")
    return Finding(
        f"{name}({number(edge)}) is -inf: {share(count, argument, f'values are {number(edge)}')}", evidence, log_fixes(view), from_spans(view, index)
    )


def log_fixes(view: View) -> list[Fix]:
    """Return the changes for a logarithm whose argument reaches its edge: from the logits where it was made of any, else a bound."""
    made = without_zeros(view.maker(0))
    fixes = of_exponentials(view)
    if hasattr(made, "name") and made is not None and view.name in _BASES:
        alone = "" if is_same(made, view.maker(0)) else ": what is added to it is 0"
        to_base = f" / {_BASES[view.name]!r}" if view.name != "log" else ""
        if made.name == "_softmax":
            fixes.append(Fix(f"compute the logarithm of the softmax directly{alone}", f"torch.log_softmax({{inner}}){to_base}", safe=True, inner="softmax"))
        elif made.name == "sigmoid":
            direct = f"torch.nn.functional.logsigmoid({{inner}}){to_base}"
            fixes.append(Fix(f"compute the logarithm of the sigmoid directly{alone}", direct, safe=True, inner="sigmoid"))
    if hasattr(made, "name") and made is not None and view.name == "log":
        fixes.append(BY_HAND)
        if made.name in ("rsub", "sub") and any(getattr(skip_views(m), "name", "") == "sigmoid" for m in _makers(made)):
            fixes.append(Fix("compute the logarithm of 1 - sigmoid directly", "torch.nn.functional.logsigmoid(-{inner})", safe=True, inner=patterns.REST))
    fixes.append(Fix("take the logarithm from the logits: log_softmax or logsigmoid instead of log", "{inner}", safe=True, inner="log directly"))
    bounds = guarded(view.name.removeprefix("special_") if "entr" not in view.name else view.name, view.op.dtype)
    return [*fixes, *bounds, *_below_the_alive(view), *([_ONE] if view.name in _BASES and spread_of(view, 0) is not None else [])]


def _below_the_alive(view: View) -> list[Fix]:
    """Return a bound below the arguments that are tiny and not 0: a usual one would cut off their gradients."""
    argument, tiny = view.input(0), {"float32": "1e-37", "bfloat16": "1e-37", "float64": "1e-300"}.get(view.op.dtype)
    if tiny is None or argument is None or view.name not in _BASES or not bool(((argument > 0) & (argument < float(small(view.op.dtype)))).any()):
        return []
    return [Fix(f"keep the argument of {view.name} at or above {tiny}, below those that are not 0", f"{{x}}.clamp_min({tiny})", 0)]


_ONE = Fix("let the spread of identical values count as 1, whose logarithm is 0", "{x}.where({x} != 0, 1.0)", 0)


def of_exponentials(view: View) -> list[Fix]:
    """Return the changes for a logarithm of exponentials that underflowed, or that rounded to 1 where 1 is taken off."""
    exponential = any(made.name == "exp" for made in lineage(view, ELEMENTWISE | {"sum", "mean", "prod"}, depth=6))
    return [LOGSUMEXP, LOG1MEXP, LOG_OF_EXP] if exponential else []


def _makers(made: View | Leaf) -> list[View | Leaf | None]:
    view = as_view(made)
    return [view.maker(i) for i in range(len(view.op.sources))] if view is not None else []


@rule("WN102", "log-of-negative", "log of a negative number", rank=61)
def log_of_negative(scene: Scene) -> Finding | None:
    """A logarithm got a number below its domain and gave NaN.

    What happened
    The argument of log, log2, log10, xlogy or log1p (below -1) was negative: a quantity that is
    positive by meaning but not by construction, such as a raw network output used as a
    variance, a rate, a determinant or `1 + w * u`.

    Why the result is non-finite
    No real power of e is negative, so the value is NaN. The slope 1/x is an ordinary number
    there: the gradient stays finite and a check of gradients alone shows nothing.

    Example
        >>> raw = torch.tensor([-0.5, 2.0], requires_grad=True)
        >>> value = torch.log(raw)
        >>> value.sum().backward()
        >>> value.detach(), raw.grad
        (tensor([   nan, 0.6931]), tensor([-2.0000,  0.5000]))

    Instead
    Make the argument positive by construction, with softplus or exp.
        >>> raw = torch.tensor([-0.5, 2.0], requires_grad=True)
        >>> value = torch.log(F.softplus(raw))
        >>> value.sum().backward()
        >>> value.detach(), raw.grad
        (tensor([-0.7464,  0.7547]), tensor([0.7964, 0.4141]))

    A clamp holds the negative entry at the bound with a gradient of 0: nothing pulls it back.
        >>> raw.grad = None
        >>> torch.log(raw.clamp_min(1e-6)).sum().backward()
        >>> raw.grad
        tensor([0.0000, 0.5000])

    How sure
    whynan counts the arguments below the edge and shows the smallest. Proven when the step,
    replayed with the change at this line, has a finite loss and a finite, living gradient;
    otherwise suspected.

    Not this when
    The argument is exactly 0 (WN101), it is the root or a fractional power that is undefined
    (WN105), or the NaN was already in the argument (WN701, WN601).
    """
    view = computed_forward(scene)
    if view is None or view.name not in _LOGS:
        return None
    argument, index = argument_of(view)
    edge = _LOGS[view.name]
    if argument is None:
        return None
    hit = lies_below(argument, edge)
    count = int(hit.sum())
    if not count:
        return None
    low = float(argument[argument.isfinite()].min())
    evidence = [share(count, argument, f"values are below {number(edge)}"), f"the smallest is {number(low)}"]
    fixes = [*_of_a_factor(view), *guarded(view.name, view.op.dtype), _BY_CONSTRUCTION]
    finding = Finding(f"log of {number(low)} is not defined", evidence, fixes, from_spans(view, index))
    return told_of_trained(scene, view, finding, index) if edge == 0 else finding


_BY_CONSTRUCTION = Fix("make it positive where it is made, with softplus or exp: then all that uses it sees the same number, and a gradient leads back")


def _of_a_factor(view: View) -> list[Fix]:
    """Return the change for the diagonal of a triangular factor: a determinant's size is asked for, and that has no sign."""
    made = view.maker(0)
    return [Fix("take the absolute value: the logarithm is of the determinant's size", "{x}.abs()", 0)] if getattr(made, "name", "") == "diagonal" else []
