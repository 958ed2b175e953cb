"""Family 1: an argument at or outside the edge of what the function accepts, in the forward pass."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from whynan.causes.arguments import computed_forward, factorised, from_spans
from whynan.causes.carried_out import told_of_trained
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import VIEWS, as_view, at_or_below, consumers, counted, doubled, is_same, lies_below, lineage, share, skip_views
from whynan.causes.fixes import Fix, guarded
from whynan.records import number

if TYPE_CHECKING:
    import torch

    from whynan.trace.birth import View

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
    that cancelled, or is made of trained values that an update carried out of the domain, and
    what these are. Proven when the step, replayed with the change, is finite with a living
    gradient; otherwise suspected.

    Not this when
    The argument is exactly 0: then the value is fine and the slope is not (WN501), or it is
    rsqrt(0) (WN106).
    """
    view = computed_forward(scene)
    if view is None or view.name not in ("sqrt", "rsqrt", "pow", "float_power"):
        return None
    base = view.input("self")
    if base is None or not bool(lies_below(base, 0).any()):
        return None
    exponent = view.scalar("exponent")
    if view.name == "pow" and isinstance(exponent, int | float) and float(exponent).is_integer():
        return None
    count, low = int(lies_below(base, 0).sum()), float(base[base.isfinite()].min())
    evidence = [share(count, base, "values are negative"), f"the smallest is {number(low)}"]
    cancelled = next((made for made in lineage(view, depth=2) if _cancels(made, low)), None)
    of_squares = cancelled is not None and _takes_off_a_square(cancelled)
    if cancelled is not None:
        how = "; take the mean off before squaring, or keep these sums in float64" if of_squares else ""
        evidence.append(f"it is a difference that cancelled: rounding pushed it below 0{how}")
    power = float(exponent) if isinstance(exponent, int | float) else 0.5
    fixes = [_SPREAD, *[_TWO_PASSES] * of_squares, *guarded(view.name.replace("float_power", "pow"), view.op.dtype, power)]
    finding = Finding(f"the root of {number(low)} is not real", evidence, fixes, from_spans(view))
    return finding if cancelled is not None else told_of_trained(scene, view, replace(finding, advice=_POSITIVE))


def _cancels(view: View, low: float) -> bool:
    """Whether a negative number is no more than what rounding leaves of a difference."""
    import torch

    terms = [t for i in range(2) if view.name in ("sub", "rsub") and (t := view.input(i)) is not None and t.is_floating_point() and t.numel()]
    return any(abs(low) <= 64 * torch.finfo(t.dtype).eps * float(t.abs().max()) for t in terms)


def _takes_off_a_square(view: View) -> bool:
    """Whether what a difference takes off is a square, as the mean is in E[x^2] - E[x]^2."""
    made = as_view(skip_views(view.maker(1)))
    if made is None or made.name not in ("pow", "mul"):
        return False
    return made.scalar("exponent") == 2 if made.name == "pow" else is_same(made.maker(0), made.maker(1))


_TWO_PASSES = Fix("take the mean off before squaring, in two passes (for running sums: Welford's update), or keep these sums in float64")
_POSITIVE = "make the argument positive where it is made: nothing cancels here, so it is below 0 by what it is made of"
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
        >>> torch.acos(cosine.clamp(-1 + 1e-7, 1 - 1e-7)).sum().backward()
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
    view = computed_forward(scene)
    if view is None or view.name not in _INVERSE:
        return None
    name = view.name.removeprefix("special_")
    argument, output = view.input("self"), view.output()
    if argument is None or output is None or (argument.is_complex() and name != "atanh"):
        return None  # of these only atanh has an edge among the complex numbers
    hit = ~output.isfinite()
    values = argument[hit] if hit.shape == argument.shape else argument
    worst = float(values.real.flatten()[values.flatten().abs().argmax()])
    domain = {"acosh": "at least 1", "logit": "between 0 and 1", "ndtri": "above 0 and below 1"}.get(name, "between -1 and 1")
    if argument.is_complex():
        domain = "other than -1 and 1"
    evidence = [_at_the_edge(name, argument, int(hit.sum())), f"the worst is {worst:.9g}; {name} takes values {domain}"]
    return Finding(f"{name}({worst:.9g}): the argument must be {domain}", evidence, guarded(name, view.op.dtype), from_spans(view))


def _at_the_edge(name: str, argument: torch.Tensor, bad: int) -> str:
    """Count the arguments at or past the edge, and those among them whose value is not finite: at the edge itself some functions have one."""
    lowest, highest = {"acosh": (1.0, math.inf), "logit": (0.0, 1.0), "ndtri": (0.0, 1.0)}.get(name, (-1.0, 1.0))
    count = int((at_or_below(argument, lowest) | at_or_below(-argument, -highest) | argument.isnan()).sum())
    words = share(count, argument, "arguments are at or past the edge")
    return words if count == bad else f"{words}, {bad} give{'s' * (bad == 1)} no finite value"


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
    their gradient is the inverse, which does not exist. Of a negative determinant logdet is NaN,
    also where the matrix has an inverse.

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
    value or more. For least squares torch.linalg.lstsq needs no inverse. Where the size of the
    determinant is meant, as in a change of variables, take torch.slogdet(w)[1].

    How sure
    whynan shows the largest and the smallest singular value. It is proven when the operation
    itself raised, or when the replay with the ridge is finite with a living gradient; otherwise
    suspected.

    Not this when
    The forward pass is finite and the gradient of eigh or svd is not (WN504), or the matrix
    already held NaN (WN601, WN701).
    """
    birth = scene.birth
    view = birth.view if birth is not None and birth.error is not None else computed_forward(scene)
    if view is None or birth is None:
        return None
    if view.name not in _LINALG and not ("linalg" in view.call or "logdet" in view.call or "cholesky" in view.call):
        return None
    failed = factorised(view)
    matrix = next((t for t in (failed or view).inputs().values() if t.dim() >= 2), None)
    evidence = []
    if birth.error is not None:
        evidence.append(str(birth.error).split("\n")[0])
    name = view.call.rsplit(".", 1)[-1].removeprefix("linalg_") or view.name
    if name == "logdet" and failed is not None and matrix is not None and (negative := _negative_determinant(failed, matrix, view.op.dtype)) is not None:
        return negative
    label, title = f"{name} of a matrix that has no inverse or is not positive definite", ""
    if matrix is not None and matrix.shape[-1] == matrix.shape[-2] and bool(matrix.isfinite().all()):
        evidence.append(_spectrum(matrix, name))
        if ratio := _lost_ratio(matrix, name):
            label, title = f"{name} of a matrix whose condition number is past what its dtype can hold", "matrix that rounding makes singular"
            evidence.append(f"the condition number is {number(ratio)}; {str(matrix.dtype).removeprefix('torch.')} can hold {_precision(matrix):.1e}")
    return Finding(
        label,
        evidence,
        _at_the_factorisation(view) or guarded(name, view.op.dtype) or guarded("inv", view.op.dtype),
        from_spans(failed or view),
        proven=birth.error is not None,
        title=title,
    )


def _at_the_factorisation(view: View) -> list[Fix]:
    """Return the change for an operation that is given a Cholesky factor: what has to be regular is the matrix that was factorised."""
    for index in range(len(view.op.sources)) if factorised(view) is None else ():
        made = as_view(skip_views(view.maker(index)))
        if made is not None and made.site is not None and made.name in ("linalg_cholesky_ex", "linalg_cholesky", "cholesky"):
            return [replace(fix, title=f"{fix.title} to what is factorised", site=made.site) for fix in guarded("cholesky", view.op.dtype)]
    return []


def _negative_determinant(view: View, matrix: torch.Tensor, dtype: str) -> Finding | None:
    """Return what there is to say of a logdet whose matrix has an inverse: its determinant lies below 0.

    The logarithm of its absolute value is what a change of variables asks for. A covariance should have had no such determinant: of that it says nothing.
    """
    import torch

    sign, size = torch.linalg.slogdet(matrix)
    below = (sign < 0).flatten()
    if matrix.is_complex() or not bool(below.any()):
        return None
    worst = matrix.reshape(-1, *matrix.shape[-2:])[below][0]
    exponent = float(size.flatten()[below][0])
    value = f"-{number(math.exp(exponent))}" if -80 < exponent < 80 else f"-exp({number(exponent)})"
    evidence = [
        f"the determinant is {value}" if below.numel() == 1 else f"{int(below.sum())} of {below.numel()} determinants are negative, the first is {value}"
    ]
    if bool((torch.linalg.slogdet(doubled(matrix))[0].flatten()[below] > 0).all()):
        evidence.append(f"in float64 the same numbers have a positive one: it is lost in the rounding of {dtype}")
    ridge = guarded("logdet", dtype)
    symmetric = worst.shape[-1] > 1 and torch.allclose(worst, worst.mT, rtol=1e-4)
    if symmetric:
        evidence.append(f"the matrix is symmetric and not positive definite: {_spectrum(worst, 'cholesky')}")
    else:
        evidence.append(f"the matrix has an inverse: {_spectrum(worst, 'logdet')}")
    absolute = Fix("take the logarithm of the determinant's absolute value", "torch.slogdet({0})[1]")
    title = "logarithm of a negative determinant"
    return Finding(f"the determinant is {value}; logdet of a negative one is nan", evidence, ridge if symmetric else [absolute], from_spans(view), title=title)


def _spectrum(matrix: torch.Tensor, name: str) -> str:
    """Say between what the eigenvalues of a matrix lie that cholesky was given, or the singular values of another."""
    import torch

    values = _values(matrix, name)
    if values is None:
        return f"row norms from {number(float(doubled(matrix).abs().square().sum(-1).min()) ** 0.5)}"
    top, low = float(values.max()), float(values.min())
    noise = abs(low) <= matrix.shape[-1] * torch.finfo(torch.float64).eps * abs(top)
    what = "eigenvalues" if _is_cholesky(name) else "singular values"
    return f"{what} from {number(top)} to {'0, within rounding' if low and noise else number(low)}"


def _lost_ratio(matrix: torch.Tensor, name: str) -> float:
    """Return the condition number of one matrix whose values are all above 0 if its own dtype cannot hold it; else 0."""
    import torch

    values = _values(matrix, name) if matrix.dim() == 2 else None
    top, low = (float(values.max()), float(values.min())) if values is not None else (0.0, 0.0)
    meant = low > matrix.shape[-1] * torch.finfo(torch.float64).eps * top
    return top / low if meant and top / low > _precision(matrix) else 0.0


def _precision(matrix: torch.Tensor) -> float:
    import torch

    return 1 / torch.finfo(matrix.dtype).eps


def _is_cholesky(name: str) -> bool:
    return name.removesuffix("_ex") == "cholesky"


def _values(matrix: torch.Tensor, name: str) -> torch.Tensor | None:
    """Return the eigenvalues of a matrix that cholesky was given, the singular values of another."""
    import torch

    wide = doubled(matrix)
    try:
        values: torch.Tensor = torch.linalg.eigvalsh(wide) if _is_cholesky(name) else torch.linalg.svdvals(wide)
    except RuntimeError:
        return None
    return values


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
    view = computed_forward(scene)
    if view is None or view.name not in _SPECIAL:
        return None
    output = view.output()
    count = int((~output.isfinite()).sum()) if output is not None else 1
    name = view.name.removeprefix("special_")
    if name in ("remainder", "fmod"):
        return Finding(f"{name} by 0 is nan", [counted(count, "divisors are 0")], guarded(name, view.op.dtype), from_spans(view, 1))
    index = 1 if name == "polygamma" else 0
    argument = view.input(index) if view.input(index) is not None else view.input("self")
    value = (
        float(argument[~output.isfinite()].flatten()[0]) if argument is not None and output is not None and output.shape == argument.shape and count else 0.0
    )
    fixes = [*_where_made(scene, view, index), *guarded(name, view.op.dtype)]
    return Finding(f"{name}({number(value)}) is a pole", [counted(count, "arguments lie on a pole")], fixes, from_spans(view, index))


def _where_made(scene: Scene, view: View, index: int) -> list[Fix]:
    """Return the change of an argument where it is made, for what takes it besides: the same pole, or a logarithm, is there too."""
    made, argument = as_view(skip_views(view.maker(index))), view.input(index)
    if scene.birth is None or made is None or made.site in (None, view.site) or made.op.backward or argument is None or bool(lies_below(argument, 0).any()):
        return []
    takers = {taker.op.index for taker in consumers(scene.birth, made) if taker.name not in VIEWS}
    title = f"keep it above 0 where it is made, for all {len(takers)} operations that take it"
    return [Fix(title, "{call}.add(1e-4)", site=made.site)] if len(takers) > 1 else []
