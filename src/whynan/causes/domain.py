"""Family 1: an argument at or outside the edge of what the function accepts, in the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import lineage, rows, share, skip_views
from whynan.causes.fixes import Fix, guarded
from whynan.causes.reductions import _forward_view
from whynan.records import Phase, Span, number

if TYPE_CHECKING:
    from whynan.trace.birth import View

_LOGS = {"log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0, "xlogy": 0.0, "special_xlogy": 0.0, "special_entr": 0.0, "special_xlog1py": -1.0, "special_log_ndtr": 0.0}
_INVERSE = ("acos", "asin", "atanh", "acosh", "erfinv", "logit", "special_logit", "special_ndtri")
_LINALG = ("linalg_inv", "linalg_inv_ex", "linalg_solve", "_linalg_solve_ex", "linalg_cholesky", "linalg_cholesky_ex", "logdet", "slogdet", "_linalg_slogdet", "linalg_slogdet",
           "_linalg_det", "inverse", "cholesky", "linalg_lu_factor_ex", "linalg_pinv", "linalg_solve_triangular", "triangular_solve", "cholesky_solve", "cholesky_inverse", "linalg_lu_solve",
           "linalg_eigh", "_linalg_eigh", "linalg_svd", "_linalg_svd", "linalg_lstsq", "linalg_ldl_factor_ex")  # fmt: skip
_SPECIAL = ("lgamma", "digamma", "polygamma", "special_zeta", "zeta", "remainder", "fmod", "mvlgamma", "special_gammaln", "igamma", "igammac", "special_bessel_y0", "special_bessel_y1")


def _view(scene: Scene) -> View | None:
    birth = scene.birth
    if birth is None or (birth.phase is Phase.BACKWARD and not (birth.op is not None and birth.op.live)):
        return None
    return _forward_view(scene)


def from_spans(view: View, index: int = 0) -> list[Span]:
    """Return the place where an argument was computed, if it is another line."""
    from whynan.capsule.sites import positions, resolve

    made = skip_views(view.maker(index))
    if made is None or not hasattr(made, "op") or made.site is None or made.op.backward:
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
    """A logarithm got an exact 0: its value is -inf and its slope infinite."""
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
    return Finding(f"{name}({number(edge)}) is -inf: {share(count, argument, f'values are {number(edge)}')}", evidence, _log_fixes(view), from_spans(view, index))


def _log_fixes(view: View) -> list[Fix]:
    made = skip_views(view.maker(0))
    fixes: list[Fix] = []
    if hasattr(made, "name") and made is not None and view.name == "log":
        if made.name == "_softmax":
            fixes.append(Fix("compute the logarithm of the softmax directly", "torch.log_softmax({inner})", safe=True, inner="softmax"))
        elif made.name == "sigmoid":
            fixes.append(Fix("compute the logarithm of the sigmoid directly", "torch.nn.functional.logsigmoid({inner})", safe=True, inner="sigmoid"))
    return fixes + guarded(view.name.removeprefix("special_") if "entr" not in view.name else view.name, view.op.dtype)


@rule("WN102", "log-of-negative", "log of a negative number", rank=61)
def log_of_negative(scene: Scene) -> Finding | None:
    """A logarithm got a number below its domain: its value is NaN."""
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
    """0 / 0, also a zero vector divided by its own norm."""
    view = _view(scene)
    if view is None:
        return None
    if view.name in ("_weight_norm", "_weight_norm_interface", "renorm"):
        return Finding("a zero weight row is divided by its own norm", ["the norm of a weight row is 0"], [Fix("initialise the weights with non-zero rows")])
    if view.name not in ("div", "cosine_similarity"):
        return None
    above, below, scalar = view.input("self"), view.input("other"), view.scalar("other")
    if below is None and scalar in (0, 0.0) and above is not None:
        return None if not bool((above == 0).any()) else Finding("0 / 0 is nan", ["the divisor is the number 0"], [Fix("keep the divisor away from 0", "max({x}, 1e-6)", 1)])
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
    return Finding("0 / 0 is nan" + (": a zero vector over its own norm" if norm else ""), evidence, fixes, from_spans(view, 1), empty=birth_on_gradient(scene))


@rule("WN103", "division-by-zero", "division by zero", rank=63)
def division_by_zero(scene: Scene) -> Finding | None:
    """A number that is not 0 is divided by 0."""
    view = _view(scene)
    if view is None or view.name not in ("div", "addcdiv", "floor_divide", "reciprocal"):
        return None
    if view.name == "reciprocal" and "truediv" not in view.call and "div" not in view.call:
        return None
    below = view.input({"addcdiv": "tensor2", "reciprocal": "self"}.get(view.name, "other"))
    if below is None:
        return Finding("division by the number 0", ["the divisor is the number 0"], [Fix("keep the divisor away from 0", "max({x}, 1e-6)", 1)]) if view.scalar("other") in (0, 0.0) else None
    count = int((below == 0).sum())
    if not count:
        return None
    place = rows(below == 0)
    evidence = [share(count, below, "denominators are 0") + (f" ({place})" if place else "")]
    fixes = guarded("div", view.op.dtype)
    if view.name == "reciprocal":
        fixes = [Fix("keep the denominator away from 0", "torch.where({x} == 0, torch.full_like({x}, 1e-6), {x})", 1)]
    return Finding(f"division by 0: {share(count, below, 'denominators are 0')}", evidence, fixes, from_spans(view, len(view.op.sources) - 1))


@rule("WN106", "negative-power-of-zero", "negative power of zero", rank=64)
def negative_power_of_zero(scene: Scene) -> Finding | None:
    """rsqrt(0), reciprocal(0) or 0 to a negative power."""
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
    return Finding(f"{view.name}(0) is inf: {share(count, base, 'values are 0')}", [share(count, base, "values are 0")], guarded(view.name.replace("float_power", "pow"), view.op.dtype, power), from_spans(view))


@rule("WN105", "root-of-negative", "root of a negative number", rank=65)
def root_of_negative(scene: Scene) -> Finding | None:
    """sqrt, rsqrt or a fractional power of a negative number."""
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
    return Finding(f"the root of {number(low)} is not real", evidence, guarded(view.name.replace("float_power", "pow"), view.op.dtype, power), from_spans(view))


@rule("WN107", "inverse-function-out-of-range", "inverse function outside its range", rank=66)
def inverse_function_out_of_range(scene: Scene) -> Finding | None:
    """acos, asin, atanh, acosh, erfinv or logit at or past the edge of its domain."""
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
    """A matrix without inverse, or not positive definite, was inverted, solved or factored."""
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
    return Finding(f"{name} of a matrix that has no inverse or is not positive definite", evidence, guarded(name, view.op.dtype) or guarded("inv", view.op.dtype), from_spans(view), proven=birth.error is not None)


@rule("WN109", "pole-of-special-function", "special function at a pole", rank=67)
def pole_of_special_function(scene: Scene) -> Finding | None:
    """lgamma, digamma, zeta at a pole; fmod or remainder by 0."""
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
    value = float(argument[~output.isfinite()].flatten()[0]) if argument is not None and output is not None and output.shape == argument.shape and count else 0.0
    return Finding(f"{name}({number(value)}) is a pole", [f"{count} arguments lie on a pole"], guarded(name, view.op.dtype), from_spans(view, index))
