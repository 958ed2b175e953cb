"""Family 1: an argument at or outside the edge of what the function accepts, in the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import as_view, lineage, rows, share, skip_views
from whynan.causes.fixes import BY_HAND, Fix, guarded
from whynan.causes.reductions import _forward_view
from whynan.records import Phase, Span, number

if TYPE_CHECKING:
    from whynan.trace.birth import View

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
_INVERSE = ("acos", "asin", "atanh", "acosh", "erfinv", "logit", "special_logit", "special_ndtri")
_LINALG = ("linalg_inv", "linalg_inv_ex", "linalg_solve", "_linalg_solve_ex", "linalg_cholesky", "linalg_cholesky_ex", "logdet", "slogdet",
           "_linalg_slogdet", "linalg_slogdet", "_linalg_det", "inverse", "cholesky", "linalg_lu_factor_ex", "linalg_pinv", "linalg_solve_triangular",
           "triangular_solve", "cholesky_solve", "cholesky_inverse", "linalg_lu_solve", "linalg_eigh", "_linalg_eigh",
           "linalg_svd", "_linalg_svd", "linalg_lstsq", "linalg_ldl_factor_ex")  # fmt: skip
_SPECIAL = (
    "lgamma",
    "digamma",
    "polygamma",
    "special_zeta",
    "zeta",
    "remainder",
    "fmod",
    "mvlgamma",
    "special_gammaln",
    "igamma",
    "igammac",
    "special_bessel_y0",
    "special_bessel_y1",
)


def _view(scene: Scene) -> View | None:
    birth = scene.birth
    if birth is None or birth.derivative:
        return None
    return _forward_view(scene)


def from_spans(view: View, index: int = 0) -> list[Span]:
    """Return the place where an argument was computed, if it is another line."""
    from whynan.capsule.sites import positions, resolve

    made = as_view(skip_views(view.maker(index)))
    if made is None or made.site is None or made.op.backward:
        return []
    here = view.site
    if here is not None and here.code is made.site.code and positions(here)[0] == positions(made.site)[0]:
        return []
    return [resolve(made.site, f"the argument was made here by {made.name.strip('_')}")]


def rounded_from(view: View) -> str:
    """Say where an exact 0 came from: a softmax or sigmoid that rounded, a mask, the data."""
    for made in lineage(view, depth=5):
        if made.name in ("_softmax", "softmax"):
            return "a softmax that rounded to 0"
        if made.name == "sigmoid":
            return "a sigmoid that rounded to 0 or 1"
        if made.name == "tanh":
            return "a tanh that rounded to 1"
        if made.name in ("relu", "threshold"):
            return "a relu"
    return ""


def _argument(view: View) -> tuple[Any, int]:
    index = 1 if view.name in ("xlogy", "special_xlogy", "special_xlog1py") else 0
    return view.input(index), index


def birth_on_gradient(scene: Scene) -> bool:
    """Whether the operation works on a gradient, which may rightly be 0."""
    return scene.birth is not None and scene.birth.phase is Phase.OPTIMIZER


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
    view = _view(scene)
    if view is None or view.name not in _LOGS:
        return None
    argument, index = _argument(view)
    edge = _LOGS[view.name]
    if argument is None or bool((argument < edge).any()):
        return None
    hit = argument == edge
    count = int(hit.sum())
    if not count:
        return None
    origin = rounded_from(view)
    name = view.name.removeprefix("special_")
    place = rows(hit)
    evidence = [share(count, argument, f"values are {number(edge)}") + (f" ({place})" if place else "")]
    if origin:
        evidence.append(f"the {number(edge)} is {origin}")
    return Finding(
        f"{name}({number(edge)}) is -inf: {share(count, argument, f'values are {number(edge)}')}", evidence, log_fixes(view), from_spans(view, index)
    )


def log_fixes(view: View) -> list[Fix]:
    """Return the changes for a logarithm whose argument reaches its edge: from the logits where it was made of any, else a bound."""
    made = skip_views(view.maker(0))
    fixes: list[Fix] = []
    if hasattr(made, "name") and made is not None and view.name == "log":
        if made.name == "_softmax":
            fixes.append(Fix("compute the logarithm of the softmax directly", "torch.log_softmax({inner})", safe=True, inner="softmax"))
        elif made.name == "sigmoid":
            fixes.append(Fix("compute the logarithm of the sigmoid directly", "torch.nn.functional.logsigmoid({inner})", safe=True, inner="sigmoid"))
        fixes.append(BY_HAND)
    fixes.append(Fix("take the logarithm from the logits: log_softmax or logsigmoid instead of log", "{inner}", safe=True, inner="log directly"))
    return fixes + guarded(view.name.removeprefix("special_") if "entr" not in view.name else view.name, view.op.dtype)


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
    view = _view(scene)
    if view is None or view.name not in _LOGS:
        return None
    argument, index = _argument(view)
    edge = _LOGS[view.name]
    if argument is None:
        return None
    hit = argument < edge
    count = int(hit.sum())
    if not count:
        return None
    low = float(argument[argument.isfinite()].min())
    evidence = [share(count, argument, f"values are below {number(edge)}"), f"the smallest is {number(low)}"]
    return Finding(f"log of {number(low)} is not defined", evidence, guarded(view.name, view.op.dtype), from_spans(view, index))


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
    eps that was there rounded to 0 (WN204), or the numerator is not 0 (WN103).
    """
    view = _view(scene)
    if view is None:
        return None
    if view.name in ("_weight_norm", "_weight_norm_interface", "renorm"):
        return Finding("a zero weight row is divided by its own norm", ["the norm of a weight row is 0"], [Fix("initialise the weights with non-zero rows")])
    if view.name not in ("div", "cosine_similarity"):
        return None
    above, below, scalar = view.input("self"), view.input("other"), view.scalar("other")
    if below is None and scalar in (0, 0.0) and above is not None:
        return (
            None
            if not bool((above == 0).any())
            else Finding("0 / 0 is nan", ["the divisor is the number 0"], [Fix("keep the divisor away from 0", "max({x}, 1e-6)", 1)])
        )
    if above is None or below is None:
        return None
    hit = (above == 0) & (below == 0)
    count = int(hit.sum())
    if not count:
        return None
    norm = any(m.name in ("linalg_vector_norm", "norm", "linalg_norm") for m in lineage(view, depth=4))
    evidence = [share(int((below == 0).sum()), below, "denominators are 0"), f"{count} quotients are 0 / 0"]
    if norm:
        evidence.append("the denominator is a norm: the vector is zero")
    fixes = [
        Fix("keep the denominator away from 0", "{x}.clamp_min(1e-12)" if view.op.dtype != "float16" else "{x}.clamp_min(1e-4)", 1),
        *guarded("div", view.op.dtype),
    ]
    if view.call.endswith("normalize"):
        eps = "1e-4" if view.op.dtype == "float16" else "1e-12"
        fixes = [Fix(f"give normalize an eps: {eps}", eps, keyword="eps")]
    return Finding("0 / 0 is nan" + (": a zero vector over its own norm" if norm else ""), evidence, fixes, from_spans(view, 1), empty=birth_on_gradient(scene))


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
    view = _view(scene)
    if view is None or view.name not in ("div", "addcdiv", "floor_divide", "reciprocal"):
        return None
    if view.name == "reciprocal" and "truediv" not in view.call and "div" not in view.call:
        return None
    below = view.input({"addcdiv": "tensor2", "reciprocal": "self"}.get(view.name, "other"))
    if below is None:
        return (
            Finding("division by the number 0", ["the divisor is the number 0"], [Fix("keep the divisor away from 0", "max({x}, 1e-6)", 1)])
            if view.scalar("other") in (0, 0.0)
            else None
        )
    count = int((below == 0).sum())
    if not count:
        return None
    place = rows(below == 0)
    evidence = [share(count, below, "denominators are 0") + (f" ({place})" if place else "")]
    fixes = guarded("div", view.op.dtype)
    if view.name == "reciprocal":
        fixes = [fixes[0], Fix("keep the denominator away from 0", "torch.where({x} == 0, torch.full_like({x}, 1e-6), {x})", 1)]
    return Finding(f"division by 0: {share(count, below, 'denominators are 0')}", evidence, fixes, from_spans(view, len(view.op.sources) - 1))


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

    The same eps outside the root guards the value only: the slope of the root stays infinite.
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
    view = _view(scene)
    if view is None or view.name not in ("rsqrt", "reciprocal", "pow", "float_power"):
        return None
    base, exponent = view.input("self"), view.scalar("exponent")
    if base is None or not bool((base == 0).any()) or bool((base < 0).any() and view.name == "rsqrt"):
        return None
    if view.name in ("pow", "float_power"):
        powers = view.input("exponent")
        if powers is None and not (isinstance(exponent, int | float) and exponent < 0):
            return None
        if powers is not None and not bool((powers < 0).any()):
            return None
    count = int((base == 0).sum())
    power = float(exponent) if isinstance(exponent, int | float) else -1.0
    return Finding(
        f"{view.name}(0) is inf: {share(count, base, 'values are 0')}",
        [share(count, base, "values are 0")],
        guarded(view.name.replace("float_power", "pow"), view.op.dtype, power),
        from_spans(view),
    )


@rule("WN105", "root-of-negative", "root of a negative number", rank=65)
def root_of_negative(scene: Scene) -> Finding | None:
    """A root or fractional power of a negative number was taken and gave NaN.

    What happened
    sqrt, rsqrt or a power with a fractional exponent got a negative base. Often it is a
    difference that is never negative on paper: `E[x^2] - E[x]^2`, a squared distance as
    `|a|^2 + |b|^2 - 2ab`, the term under the root of Heron's formula.

    Why the result is non-finite
    The root of a negative number is not real. Two nearly equal float32 numbers subtracted keep
    only their rounding errors, and those have either sign.

    Example
        >>> x = torch.tensor([1000.1, 1000.2], requires_grad=True)
        >>> variance = (x * x).mean() - x.mean() ** 2
        >>> variance.item(), torch.sqrt(variance).item()
        (-0.0625, nan)

    Instead
    Subtract first and square then; keep a small number inside the root.
        >>> spread = (x.var(correction=0) + 1e-6).sqrt()
        >>> spread.backward()
        >>> round(spread.item(), 3), x.grad.round(decimals=2)
        (0.05, tensor([-0.5000,  0.5000]))

    clamp_min under the root is finite, but a clamped element has the gradient 0 from then on.
    For a power of a signed number use `x.sign() * (x.abs() + 1e-8).pow(p)`.
        >>> x.grad = None
        >>> variance.clamp_min(1e-6).sqrt().backward()
        >>> x.grad
        tensor([0., 0.])

    How sure
    whynan counts the negative arguments, shows the smallest, and says when it is a difference
    that cancelled. Proven when the step, replayed with the change, is finite with a living
    gradient; otherwise suspected.

    Not this when
    The argument is exactly 0: then the value is fine and the slope is not (WN501), or it is
    rsqrt(0) (WN106).
    """
    view = _view(scene)
    if view is None or view.name not in ("sqrt", "rsqrt", "pow", "float_power"):
        return None
    base = view.input("self")
    if base is None or not bool((base < 0).any()):
        return None
    exponent = view.scalar("exponent")
    if view.name == "pow" and isinstance(exponent, int | float) and float(exponent).is_integer():
        return None
    count, low = int((base < 0).sum()), float(base[base.isfinite()].min())
    evidence = [share(count, base, "values are negative"), f"the smallest is {number(low)}"]
    if any(m.name in ("sub", "rsub") for m in lineage(view, depth=2)) and abs(low) < 1e-2 * max(1.0, abs(float(base[base.isfinite()].max()))):
        evidence.append("it is a difference that cancelled: rounding pushed it below 0")
    power = float(exponent) if isinstance(exponent, int | float) else 0.5
    fixes = [_SPREAD, *guarded(view.name.replace("float_power", "pow"), view.op.dtype, power)]
    return Finding(f"the root of {number(low)} is not real", evidence, fixes, from_spans(view))


_SPREAD = Fix("compute the variance with torch.var (correction=0), which cannot cancel", "{inner}", safe=True, inner="variance by hand")


@rule("WN107", "inverse-function-out-of-range", "inverse function outside its range", rank=66)
def inverse_function_out_of_range(scene: Scene) -> Finding | None:
    """An inverse function got an argument at or past the edge of its range.

    What happened
    acos, asin, atanh or erfinv got a value at or beyond -1 or 1, acosh one below 1, logit a 0
    or 1. The argument is usually a cosine of unit vectors that rounding pushed past 1, or a
    tanh that rounded to 1.

    Why the result is non-finite
    Past the edge the function has no real value (NaN); atanh, erfinv and logit are infinite at
    the edge itself.

    Example
        >>> cosine = torch.tensor([1.0000001, 0.5], requires_grad=True)
        >>> angle = torch.acos(cosine)
        >>> angle.sum().backward()
        >>> angle.detach(), cosine.grad
        (tensor([   nan, 1.0472]), tensor([    nan, -1.1547]))

    Instead
    An angle comes from atan2, which is exact where the cosine has already rounded to 1.
        >>> a, b = torch.tensor([1.0, 0.0], requires_grad=True), torch.tensor([1.0, 1e-4])
        >>> angle = torch.atan2(a[0] * b[1] - a[1] * b[0], a @ b)
        >>> angle.backward()
        >>> angle.detach(), a.grad
        (tensor(1.0000e-04), tensor([ 0., -1.]))

    For atanh(tanh(u)) keep u. A clamp is finite, but the entries it holds have no gradient.
        >>> cosine.grad = None
        >>> torch.acos(cosine.clamp(-1 + 1e-6, 1 - 1e-6)).sum().backward()
        >>> cosine.grad
        tensor([ 0.0000, -1.1547])

    How sure
    whynan counts the arguments at or past the edge and shows the worst with nine digits. Proven
    when the step, replayed with the change, is finite with a living gradient; otherwise
    suspected.

    Not this when
    acos, asin or acosh stand exactly on the edge: their value is finite there and the slope is
    not (WN501). A clamp to `1 - 1e-8` that is 1 in float32 is WN204.
    """
    view = _view(scene)
    if view is None or view.name not in _INVERSE:
        return None
    argument, output = view.input("self"), view.output()
    if argument is None or output is None:
        return None
    hit = ~output.isfinite()
    values = argument[hit] if hit.shape == argument.shape else argument
    worst = float(values.flatten()[values.flatten().abs().argmax()])
    name = view.name.removeprefix("special_")
    domain = {"acosh": "at least 1", "logit": "between 0 and 1"}.get(name, "between -1 and 1")
    evidence = [share(int(hit.sum()), argument, "arguments are at or past the edge"), f"the worst is {worst:.9g}; {name} takes values {domain}"]
    return Finding(f"{name}({worst:.9g}): the argument must be {domain}", evidence, guarded(name, view.op.dtype), from_spans(view))


@rule("WN108", "singular-matrix", "matrix without inverse", rank=35)
def singular_matrix(scene: Scene) -> Finding | None:
    """A matrix without inverse, or one that is not positive definite, was inverted or factored.

    What happened
    inv, solve, cholesky, logdet, slogdet or another factorisation met a matrix with a singular
    value at or near 0, or with a negative eigenvalue: equal or dependent rows, fewer samples
    than features, a covariance or kernel of identical points.

    Why the result is non-finite
    The inverse divides by the singular values and logdet takes the logarithm of their product.
    inv, solve and cholesky raise torch.linalg.LinAlgError; logdet and slogdet give -inf, and
    their gradient is the inverse, which does not exist.

    Example
        >>> gram = torch.ones(2, 2, requires_grad=True)
        >>> value = torch.logdet(gram)
        >>> value.backward()
        >>> value.item(), gram.grad.isfinite().any().item()
        (-inf, False)

    Instead
    Add a small multiple of the identity: the eigenvalues of a covariance or kernel are then at
    least that large.
        >>> gram = torch.ones(2, 2, requires_grad=True)
        >>> value = torch.logdet(gram + 1e-2 * torch.eye(2))
        >>> value.backward()
        >>> value.detach(), gram.grad
        (tensor(-3.9070), tensor([[ 50.2488, -49.7513],
                [-49.7513,  50.2488]]))

    A ridge below the rounding of the matrix is lost: in float32 take about 1e-6 of its largest
    value or more. For least squares torch.linalg.lstsq needs no inverse.

    How sure
    whynan shows the largest and the smallest singular value. It is proven when the operation
    itself raised, or when the replay with the ridge is finite with a living gradient; otherwise
    suspected.

    Not this when
    The forward pass is finite and the gradient of eigh or svd is not (WN504), or the matrix
    already held NaN (WN601, WN701).
    """
    birth = scene.birth
    view = birth.view if birth is not None and birth.error is not None else _view(scene)
    if view is None or birth is None:
        return None
    if view.name not in _LINALG and not ("linalg" in view.call or "logdet" in view.call or "cholesky" in view.call):
        return None
    matrix = next((t for t in view.inputs().values() if t.dim() >= 2), None)
    evidence = []
    if birth.error is not None:
        evidence.append(str(birth.error).split("\n")[0])
    if matrix is not None and matrix.shape[-1] == matrix.shape[-2] and bool(matrix.isfinite().all()):
        values = (matrix.double() @ matrix.double().transpose(-1, -2)).diagonal(dim1=-2, dim2=-1)
        try:
            import torch

            spectrum = torch.linalg.svdvals(matrix.double())
            evidence.append(f"singular values from {number(float(spectrum.max()))} to {number(float(spectrum.min()))}")
        except RuntimeError:
            evidence.append(f"row norms from {number(float(values.min()) ** 0.5)}")
    name = view.call.rsplit(".", 1)[-1].removeprefix("linalg_") or view.name
    return Finding(
        f"{name} of a matrix that has no inverse or is not positive definite",
        evidence,
        guarded(name, view.op.dtype) or guarded("inv", view.op.dtype),
        from_spans(view),
        proven=birth.error is not None,
    )


@rule("WN109", "pole-of-special-function", "special function at a pole", rank=67)
def pole_of_special_function(scene: Scene) -> Finding | None:
    """A special function was evaluated at one of its poles.

    What happened
    lgamma, digamma or polygamma got 0 or a negative integer, zeta an exponent of 1, or fmod or
    remainder a divisor of 0.

    Why the result is non-finite
    These functions grow without bound towards a pole, so the value there is inf or NaN; the
    remainder by 0 is not defined.

    Example
        >>> alpha = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> value = torch.lgamma(alpha)
        >>> value.sum().backward()
        >>> value.detach(), alpha.grad
        (tensor([inf, 0.]), tensor([   -inf, -0.5772]))

    Instead
    Keep the parameter positive by construction, with a floor that its slope can bear.
        >>> raw = torch.tensor([0.0, 1.0], requires_grad=True)
        >>> value = torch.lgamma(F.softplus(raw) + 1e-2)
        >>> value.sum().backward()
        >>> value.detach(), raw.grad
        (tensor([ 0.2570, -0.1118]), tensor([-0.6056, -0.1046]))

    alpha.clamp_min(1e-4) is finite as well, but an alpha below the bound has the gradient 0:
    nothing pulls it back. For a remainder replace the divisor before the call:
        >>> phase, period = torch.tensor([7.0, 7.0]), torch.tensor([0.0, 4.0])
        >>> safe = torch.where(period == 0, 1.0, period)
        >>> torch.remainder(phase, period), torch.remainder(phase, safe)
        (tensor([nan, 3.]), tensor([0., 3.]))

    How sure
    whynan counts the arguments that lie on a pole and shows one. Proven when the step, replayed
    with the change, is finite with a living gradient; otherwise suspected.

    Not this when
    It is a plain division by 0 (WN103, WN104), a logarithm (WN101) or the overflow of
    exp(lgamma(x)) (WN201).
    """
    view = _view(scene)
    if view is None or view.name not in _SPECIAL:
        return None
    output = view.output()
    count = int((~output.isfinite()).sum()) if output is not None else 1
    name = view.name.removeprefix("special_")
    if name in ("remainder", "fmod"):
        return Finding(f"{name} by 0 is nan", [f"{count} divisors are 0"], guarded(name, view.op.dtype), from_spans(view, 1))
    index = 1 if name == "polygamma" else 0
    argument = view.input(index) if view.input(index) is not None else view.input("self")
    value = (
        float(argument[~output.isfinite()].flatten()[0]) if argument is not None and output is not None and output.shape == argument.shape and count else 0.0
    )
    return Finding(f"{name}({number(value)}) is a pole", [f"{count} arguments lie on a pole"], guarded(name, view.op.dtype), from_spans(view, index))
