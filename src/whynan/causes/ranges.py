"""Family 2: the result does not fit the dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whynan.causes.arguments import forward_view
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import ATTENTION, LIMITS, biggest, doubled
from whynan.causes.fixes import BRAIN, LOG_OF_EXP, LOGSUMEXP, SOFTMAX, Fix, guarded, shifted
from whynan.records import number

if TYPE_CHECKING:
    from whynan.trace.birth import Birth, View

_BESSEL = ("i0", "special_i1", "special_modified_bessel_i0", "special_modified_bessel_i1")  # they grow as exp does, on both sides
_EXPONENTIALS = ("exp", "expm1", "exp2", "sinh", "cosh", "softplus", "poisson_nll_loss", *_BESSEL)


def _wide(view: View) -> tuple[Any, str]:
    """Compute the operation again in float64 on the kept inputs; return the result, or why not."""
    import torch

    overload = view.op.name.removeprefix("aten.").split(".")
    packet = getattr(torch.ops.aten, overload[0].rstrip("_") or overload[0], None)
    if packet is None:
        return None, "unknown operation"
    kept = view.inputs()
    try:
        operator = getattr(packet, overload[1])
        values: list[Any] = []
        for argument in operator._schema.arguments:
            if argument.name in kept:
                values.append(doubled(kept[argument.name]))
            elif argument.kwarg_only:
                continue
            elif argument.name in view.op.scalars:
                scalar = view.op.scalars[argument.name]
                values.append(torch.float64 if scalar in (torch.float16, torch.bfloat16, torch.float32) else scalar)
            else:
                values.append(argument.default_value)
        if view.name == "_to_copy":
            return doubled(next(iter(kept.values()))), ""
        return operator(*values), ""
    except Exception as error:  # an operation that has no float64 form is not an argument for anything
        return None, str(error)


def overflowed(view: View) -> Any:
    """Return the result in float64 where it is finite and the dtype's own result is not, of several the one that is kept; else None."""
    result, _ = _wide(view)
    tensors = [t for t in (result if isinstance(result, tuple | list) else [result]) if hasattr(t, "isfinite")]
    if not tensors or not all(bool(t.isfinite().all()) for t in tensors):
        return None
    own = view.output()
    return next((t for t in tensors if own is not None and t.shape == own.shape), tensors[0])


@rule("WN201", "exp-overflow", "exponential past the range", rank=51)
def exp_overflow(scene: Scene) -> Finding | None:
    """An exponential got an argument past the largest exponent its dtype can hold.

    What happened
    exp, expm1, exp2, sinh, cosh, a Bessel function (i0, i1) or a Poisson loss of a log rate was
    given too large a number.
    The limit of exp is 88.72 in float32 and bfloat16 and 11.09 in float16.

    Why the result is non-finite
    The true result is finite but larger than the dtype's largest number, so it is stored as
    inf. Its slope is inf too, and a following 1 / x or log sends 0 * inf back.

    Example
        >>> x = torch.tensor([100.0, 0.0], requires_grad=True)
        >>> value = torch.log(1 + torch.exp(x))
        >>> value.sum().backward()
        >>> value.detach(), x.grad
        (tensor([   inf, 0.6931]), tensor([   nan, 0.5000]))

    Instead
    Use the function that never forms the large number: softplus, logsumexp, log_softmax,
    sigmoid; for log(cosh(x)) it is `x + F.softplus(-2 * x) - log(2)`.
        >>> x = torch.tensor([100.0, 0.0], requires_grad=True)
        >>> value = F.softplus(x)
        >>> value.sum().backward()
        >>> value.detach(), x.grad
        (tensor([100.0000,   0.6931]), tensor([1.0000, 0.5000]))

    A clamp of the exponent is finite, but what lies beyond it has the gradient 0.
        >>> x.grad = None
        >>> torch.log(1 + torch.exp(x.clamp(max=80))).sum().backward()
        >>> x.grad
        tensor([0.0000, 0.5000])

    How sure
    whynan shows the largest argument beside the limit of the dtype. Proven when the step,
    replayed with the change, is finite with a living gradient and a loss of the usual size;
    otherwise suspected.

    Not this when
    The infinities meet in the same expression, as inf / inf (WN303) or 0 * inf (WN302), or the
    loss grew step by step until here (WN605).
    """
    view = forward_view(scene)
    birth = scene.birth
    if view is None or birth is None or birth.derivative or view.name not in _EXPONENTIALS:
        return None
    argument = view.input(0)
    dtype = view.op.dtype
    if argument is None or not argument.numel():
        return None
    finite = argument[argument.isfinite()].real  # the size of a complex exponential is that of its real part
    top = float(finite.abs().max() if view.name in ("sinh", "cosh", *_BESSEL) else finite.max()) if finite.numel() else float("inf")
    name = view.name.removeprefix("special_")
    limit = {"float16": 11.09, "bfloat16": 88.72, "float32": 88.72, "float64": 709.78, "complex128": 709.78}.get(dtype, 88.72)
    output = view.output()
    count = int((~output.isfinite()).sum()) if output is not None else 1
    evidence = [f"the largest argument is {number(top)}; {name} overflows {dtype} past {limit}", f"{count} of {argument.numel()} results are infinite"]
    fixes = [*by_hand(view.name), *_normalised(birth, view), *guarded(view.name, dtype), *_tighter(view.name, dtype), _BOUND]
    if "poisson" in view.call:
        fixes = [Fix("keep the log rate at or below 80", "{x}.clamp(max=80)", 0)]
    return Finding(f"{name}({number(top)}) is past the range of {dtype} ({limit})", evidence, fixes)


def _normalised(birth: Birth, view: View) -> list[Fix]:
    """Where the exponentials are divided by their sum, a common factor cancels: the largest exponent can be taken out first."""
    from whynan.causes.facts import consumers

    if view.name != "exp":
        return []
    used = list(consumers(birth, view))[:8]
    sums = {v.op.index: v for v in used if v.name == "sum"}
    for divided in (v for v in used if v.name == "div" and len(v.op.sources) > 1):
        total = sums.get(divided.op.sources[1].maker)
        if total is not None and (fixes := shifted(total)):
            return fixes
    return []


def by_hand(name: str) -> list[Fix]:
    """The functions people write out with an exponential; each has a form that cannot overflow."""
    if name == "cosh":
        return [
            Fix("write log(cosh(x)) so that it cannot overflow", "{inner}", safe=True, inner="logcosh by hand"),
            Fix("write log(cosh(x)) as |x| + softplus(-2|x|) - log(2)", "{inner}", safe=True, inner="log of exp"),
        ]
    if name in _BESSEL:
        scaled = f"{name[-2:]}e"
        return [Fix(f"work with the logarithm, torch.special.{scaled}(x).log() + x.abs(): {scaled} never forms the large number")]
    if name != "exp":
        return []
    return [
        SOFTMAX,
        Fix("use torch.sigmoid", "{inner}", safe=True, inner="sigmoid by hand"),
        Fix("use torch.tanh", "{inner}", safe=True, inner="tanh by hand"),
        LOGSUMEXP,
        Fix("use softplus", "{inner}", safe=True, inner="softplus by hand"),
        LOG_OF_EXP,
    ]


_BOUND = Fix("keep what enters here in range: normalise it, or work with its logarithm")


def _tighter(name: str, dtype: str) -> list[Fix]:
    if dtype == "float16" or name not in ("exp", "expm1"):
        return []
    return [Fix(f"keep the exponent at or below {top}", f"{{x}}.clamp(max={top})", 0) for top in (40, 20, 10)]


@rule("WN202", "half-overflow", "result past the range of float16", rank=52)
def half_overflow(scene: Scene) -> Finding | None:
    """A float16 result was larger than 65504; in float32 it is finite.

    What happened
    A product, sum, power, matrix product or cast to float16 left the range of that dtype:
    attention scores before scaling, squared errors, sums over many elements.

    Why the result is non-finite
    float16 ends at 65504, so the square of 256 is already inf. Under autocast with float16 this
    concerns all matrix products, also where the weights and the inputs are float32.

    Example
        >>> x = torch.tensor([300.0, 1.0], dtype=torch.float16, requires_grad=True)
        >>> loss = (x ** 2).mean()
        >>> loss.item()
        inf

    Instead
    Compute this part in float32, or train in bfloat16, which has the range of float32.
        >>> loss = (x.float() ** 2).mean()
        >>> loss.backward()
        >>> loss.item(), x.grad
        (45000.5, tensor([300.,   1.], dtype=torch.float16))

    For attention divide the query before the product, not the scores after it:
        >>> q = torch.full((1, 64), 40.0, dtype=torch.float16)
        >>> (q @ q.T / 8).item(), (q / 8 @ q.T).item()
        (inf, 12800.0)

    An inf can hide: 300 / inf is 0, so a norm that overflowed gives zeros and no NaN at all.

    How sure
    whynan computes the same operation on the same inputs in float64. It is proven when that
    result is finite and larger than 65504; a change at the line is replayed as well.

    Not this when
    The function is an exponential (WN201), the dtype is float32 or bfloat16 (WN203), the
    gradient and not the value overflowed (WN503), or the scaler never finds a scale (WN606).
    """
    view = forward_view(scene)
    birth = scene.birth
    if birth is not None and birth.error is not None and "without overflow" in str(birth.error) and view is not None:
        return _refused(view)
    if view is None or birth is None or birth.derivative or view.op.dtype != "float16":
        return None
    wide = overflowed(view)
    if wide is None:
        return None
    size = biggest(wide)
    if size <= 65504:
        return None
    name = {"mm": "product", "bmm": "product", "addmm": "product", "baddbmm": "product", "_to_copy": "value", "sum": "sum", "pow": "power"}.get(
        view.name, view.name
    )
    evidence = [f"max |{name}| is {number(size)}, float16 ends at 65 504", "computed in float32 the same operation is finite"]
    if _is_cast_for_another(view):
        evidence[1] = f"autocast made it float16 for {view.call.rsplit('.', 1)[-1]}"
    return Finding(f"max |{name}| {number(size)}, float16 ends at 65 504", evidence, _half_fixes(view), proven=True)


def _refused(view: View) -> Finding | None:
    """A number written in the source that the tensor's dtype cannot hold: torch refuses instead of storing an infinity."""
    values = [v for v in view.op.scalars.values() if isinstance(v, int | float) and abs(v) > LIMITS["float16"]]
    if not values:
        return None
    lowest = "torch.finfo({0}.dtype).min" if values[0] < 0 else "torch.finfo({0}.dtype).max"
    fixes = [Fix("use the largest number of the dtype", lowest, keyword="value"), Fix("use the largest number of the dtype", lowest, 2)]
    return Finding(
        f"{number(float(values[0]))} does not fit: float16 ends at 65 504", [f"{view.name} was asked to write {number(float(values[0]))}"], fixes, proven=True
    )


_KEEP = Fix("keep this part in float32, or bring the values down before it")
_CASTS = frozenset({"to", "half", "type", "type_as", "copy_", "to_copy", "_to_copy", "tensor", "as_tensor", "asarray", "new_tensor"})


def _is_cast_for_another(view: View) -> bool:
    """Whether a cast is not a call of the program's: autocast makes it for the function that is called."""
    called = view.call.rsplit(".", 1)[-1]
    return view.name == "_to_copy" and bool(called) and called not in _CASTS


def _half_fixes(view: View) -> list[Fix]:
    title = "compute this in float32"
    if _is_cast_for_another(view):
        return [BRAIN, _KEEP]
    if view.name == "_to_copy":
        return [
            Fix("use bfloat16, which has the range of float32", "{0}.bfloat16()"),
            Fix("use bfloat16, which has the range of float32", "{0}.to(torch.bfloat16)"),
            Fix("stay in float32", "{0}.float()"),
        ]
    if view.name in ("mm", "bmm", "addmm", "baddbmm"):
        return [
            Fix("scale before the product instead of after it", "{inner}", safe=True, inner="scale first"),
            Fix(title, "torch.matmul({0}.float(), {1}.float())"),
            BRAIN,
            _KEEP,
        ]
    return [*(Fix(title, "{x}.float()", place) for place in _wide_enough(view)), BRAIN, _KEEP]


def _wide_enough(view: View) -> list[int]:
    """Return which operand makes the result float32: not one without dimensions beside one with, which torch leaves at the other's dtype."""
    given = [view.input(i) for i in range(len(view.op.sources))]
    if len(given) < 2 or view.name in ("sum", "mean", "cumsum", "prod"):
        return [0, 1] if view.name in ("mul", "add", "sub", "rsub", "pow") else [0]  # a number may stand before it
    return [max(range(2), key=lambda i: ((t := given[i]) is not None and t.dim() > 0, -i))]


_SUMMING = frozenset({"mean", "var", "std", "linalg_vector_norm", "norm", "var_mean", "mse_loss", "native_layer_norm", "native_group_norm", "_fused_rms_norm",
                      "native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"})  # their sums overflow, not their results  # fmt: skip


@rule("WN203", "float-overflow", "result past the range of its dtype", rank=53)
def float_overflow(scene: Scene) -> Finding | None:
    """A product, power, sum or matrix product was past the range of its dtype.

    What happened
    The inputs were finite, and the result is larger than 3.4e38 (float32, bfloat16): the square
    of an unnormalised value, a product over many factors, a recurrence or polynomial with a
    gain above 1.

    Why the result is non-finite
    A result that does not fit is stored as inf. The numbers were out of proportion before this
    line; here they no longer fit.

    Example
        >>> x = torch.full((50,), 10.0, requires_grad=True)
        >>> x.prod().item()
        inf

    Instead
    Work with logarithms, or normalise what goes in (scale of the data, a norm layer, the gain).
        >>> value = x.log().sum()
        >>> value.backward()
        >>> value.detach(), x.grad[:2]
        (tensor(115.1293), tensor([0.1000, 0.1000]))

    Clamping the inputs makes it finite, but every clamped entry has the gradient 0. With
    targets of the size 1e20 the mean squared error is inf; their standardised form is not:
        >>> guess, target = torch.zeros(2), torch.tensor([1e20, -1e20])
        >>> F.mse_loss(guess, target).item(), F.mse_loss(guess, target / 1e20).item()
        (inf, 1.0)

    How sure
    whynan computes the operation again in float64 on the same inputs. The cause is proven when
    that result is finite and past the limit of the dtype, also where no change was replayed;
    suspected when only the size of the inputs points to it.

    Not this when
    The loss or the gradient norm grew over the last steps (WN605), the dtype is float16
    (WN202), or the operation is an exponential (WN201).
    """
    view = forward_view(scene)
    birth = scene.birth
    if view is None or birth is None or birth.derivative or view.op.dtype not in ("float32", "bfloat16", "float64", "complex64", "complex128"):
        return None
    if any(s.damage for s in view.op.sources) or not birth.op or (birth.op.damage.nan and view.name in ("sub", "div", "log", "sqrt")):
        return None
    wide = overflowed(view)
    limit = LIMITS[view.op.dtype]
    largest = max((biggest(t) for t in view.inputs().values() if t.is_floating_point() or t.is_complex()), default=0.0)
    if wide is None and largest < limit**0.3:
        return None
    inner = view.name in _SUMMING or view.name.startswith(ATTENTION)  # whose scores overflow
    if wide is not None and biggest(wide) < limit * 0.9 and not inner:
        return None
    size = biggest(wide) if wide is not None else float("inf")
    fits = inner and size < limit
    over = f"what it adds up is past {number(limit)}" if fits else f"the result {number(size)} is past {number(limit)}"
    evidence = [f"the largest input is {number(largest)}", f"the result would be {number(size)}, {view.op.dtype} ends at {number(limit)}"]
    if fits:
        evidence[-1] = f"the result would be {number(size)}, but {view.op.dtype} ends at {number(limit)} on the way to it"
    fixes = [Fix("bring the values down before this operation", "{x}.clamp(-1e9, 1e9)", 0)]
    if view.name in ("prod", "cumprod"):
        fixes = [Fix("bring the factors down before the product", "{x}.clamp(-1e3, 1e3)", 0)]
    fixes.append(Fix("normalise the values that enter here"))
    return Finding(f"{number(largest)} goes in, {over}", evidence, fixes, proven=wide is not None)
