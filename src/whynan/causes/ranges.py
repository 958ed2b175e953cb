"""Family 2: the result does not fit the dtype, or a guard is lost in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whynan.causes.arguments import forward_view
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import ATTENTION, ELEMENTWISE, LIMITS, biggest, doubled, lineage
from whynan.causes.fixes import BRAIN, LOG_OF_EXP, LOGSUMEXP, SOFTMAX, Fix, guarded, shifted
from whynan.records import number

if TYPE_CHECKING:
    from whynan.records import Span
    from whynan.trace.birth import Birth, View

_BESSEL = ("i0", "special_i1", "special_modified_bessel_i0", "special_modified_bessel_i1")  # they grow as exp does, on both sides
_EXPONENTIALS = ("exp", "expm1", "exp2", "sinh", "cosh", "softplus", "poisson_nll_loss", *_BESSEL)
_GUARDED = (
    "div",
    "log",
    "rsqrt",
    "reciprocal",
    "sqrt",
    "pow",
    "atanh",
    "acos",
    "log1p",
    "logit",
    "log2",
    "log10",
    "special_entr",
    "xlogy",
    "erfinv",
    "asin",
    "sub",
    "rsub",
)


@rule("WN204", "epsilon-lost", "guard that rounds away in this dtype", rank=29)
def epsilon_lost(scene: Scene) -> Finding | None:
    """A small number that should have kept a value off its edge was rounded away by the dtype.

    What happened
    A guard is in the source but not in the arithmetic: an eps that is 0 in this dtype (1e-8 in
    float16), or an upper bound such as `1 - 1e-8` that is exactly 1 in float32.

    Why the result is non-finite
    float16 has no number between 0 and 6e-8. Next to 1 the steps are 6e-8 in float32, 4.9e-4 in
    float16 and 3.9e-3 in bfloat16. With the guard gone, the division or logarithm meets its
    edge.

    Example
        >>> x = torch.tensor([0.0, 1.0], dtype=torch.float16, requires_grad=True)
        >>> (x / (x.abs() + 1e-8)).detach()
        tensor([nan, 1.], dtype=torch.float16)
        >>> p = torch.tensor([1.0, 0.5])
        >>> torch.log(1 - p.clamp(1e-8, 1 - 1e-8))
        tensor([   -inf, -0.6931])

    Instead
    Use a guard that exists in the dtype, or do this part in float32.
        >>> value = x / (x.abs() + 1e-3)
        >>> value.sum().backward()
        >>> value.tolist()[0], x.grad
        (0.0, tensor([9.9950e+02, 9.7656e-04], dtype=torch.float16))
        >>> torch.log(1 - p.clamp(1e-6, 1 - 1e-6))
        tensor([-13.8023,  -0.6931])

    The clamp still gives the gradient 0 to what it holds; losses on logits need none.
    F.normalize and F.cosine_similarity take eps=1e-4 in float16.

    How sure
    whynan rounds the constants of the operation and of what made its argument to their dtype,
    and looks whether the guarded value is at its edge. Proven when the step replayed with a
    larger guard is finite and alive; otherwise suspected.

    Not this when
    There is no guard (WN101, WN104, WN106), or the eps is the optimizer's (WN604).
    """
    view = forward_view(scene)
    if view is None or (view.name not in _GUARDED and "norm" not in view.name):
        return None
    near = {view.op.index, *(made.op.index for made in lineage(view, depth=6))}
    for made in [view, *lineage(view, ELEMENTWISE | _BETWEEN, depth=8)]:
        lost = _lost_constant(made)
        if lost is None:
            continue
        value, became, dtype = lost
        direct = made.op.index in near
        if not (_matters(view, made, became) if direct else _at_its_edge(view, made, became)):
            continue
        eps = {"float16": "1e-4", "bfloat16": "1e-2" if became == 1 else "1e-6", "float32": "1e-6"}.get(dtype, "1e-6")
        fixes = _fixes_for(view, dtype, eps)
        return Finding(
            f"the guard {_constant(value)} is {int(became)} in {dtype}",
            [
                f"{_constant(value)} rounds to {int(became)} in {dtype}, whose smallest step there is {_step(dtype, became)}",
                _at_edge(view, became) if direct else _let_through(made, became),
            ],
            fixes if direct else [*_next_to_zero(view, value, dtype), *_at_the_guard(made, became, dtype), *fixes],
            [] if direct else _guard_spans(view, made),
        )
    return None


_BETWEEN = frozenset({"log", "log1p", "log2", "log10", "sigmoid", "reciprocal", "rsqrt", "expm1", "logit", "acos", "asin", "atanh", "tanh"})


def _at_its_edge(view: View, guard: View, became: float) -> bool:
    """Whether a guard some operations earlier let through its edge exactly where this operation got a bad argument."""
    bad, held = view.output(), guard.output()
    if bad is None or held is None or bad.shape != held.shape:
        return False
    hit = ~bad.isfinite()
    return bool(hit.any()) and bool((held[hit] == became).all())


def _let_through(guard: View, became: float) -> str:
    held = guard.output()
    return "" if held is None else f"{int((held == became).sum())} of {held.numel()} values are {int(became)} after the guard"


def _at_the_guard(guard: View, became: float, dtype: str) -> list[Fix]:
    """Give the guard a bound that exists in the dtype, at its own line."""
    if guard.site is None or not guard.name.startswith("clamp"):
        return []
    eps = {"float16": "5e-4", "bfloat16": "4e-3"}.get(dtype, "1e-6") if became == 1 else "1e-4" if dtype == "float16" else "1e-6"
    bound, title = f"1 - {eps}" if became == 1 else eps, f"use a guard that exists in {dtype}: {eps}"
    place = 2 if became == 1 and guard.name == "clamp" else 1
    return [Fix(title, bound, place, site=guard.site), Fix(title, bound, keyword="max" if became == 1 else "min", site=guard.site)]


def _next_to_zero(view: View, value: float, dtype: str) -> list[Fix]:
    """Put a guard that is lost next to 1 behind the logarithm, where what it keeps off is 0 and the dtype has small steps."""
    if view.name not in ("log", "log2", "log10") or not 0.5 < value < 1:
        return []
    eps = "1e-4" if dtype == "float16" else number(1 - value)
    return [Fix(f"put the guard next to 0, where {dtype} has small steps", f"{{x}}.clamp_min({eps})", 0)]


def _guard_spans(view: View, guard: View) -> list[Span]:
    """The line of the guard, if it is another."""
    from whynan.capsule.sites import resolve

    span, here = resolve(guard.site, "the guard is here"), resolve(view.site)
    return [span] if span.known and (span.file, span.line) != (here.file, here.line) else []


def _constant(value: float) -> str:
    return f"1 - {number(1 - value)}" if 0.5 < value < 1 else f"1 + {number(value - 1)}" if 1 < value < 1.5 else number(value)


def _fixes_for(view: View, dtype: str, eps: str) -> list[Fix]:
    operand = 1 if view.name == "div" else 0
    clamp = Fix(f"use a guard that exists in {dtype}: {eps}", f"{{x}}.clamp_min({eps})", operand)
    if view.name in ("acos", "asin", "atanh", "erfinv"):
        return guarded(view.name, dtype)
    if view.call.endswith("normalize") or "cosine" in view.call:
        return [Fix(f"use a guard that exists in {dtype}: {eps}", eps, keyword="eps"), clamp]
    return [clamp, Fix(f"add a guard that exists in {dtype}: {eps}", f"{{x}} + {eps}", operand)]  # through which the gradient goes on


def _lost_constant(view: View) -> tuple[float, float, str] | None:
    """Return a constant among an operation's numbers that is another number in its dtype."""
    import torch

    name = view.op.dtype
    dtype = getattr(torch, name, None)
    if dtype is None or not dtype.is_floating_point or view.name in ("mul", "_to_copy", "pow", "div"):
        return None
    lifted = [m.op.scalars.get("s") for m in view.parents() if m.name == "scalar_tensor"]
    for value in [*view.op.scalars.values(), *lifted]:
        if not isinstance(value, float) or value == 0 or abs(value) > 1.001:
            continue
        became = float(torch.tensor(value, dtype=torch.float64).to(dtype))
        if became == 0 and view.name in ("add", "sub", "clamp", "clamp_min", "maximum", "native_layer_norm", "rsub"):
            return value, 0.0, name
        if became == 1 and value != 1 and view.name in ("clamp", "clamp_max", "minimum", "mul", "rsub"):
            return value, 1.0, name
    return None


def _matters(view: View, guard: View, became: float) -> bool:
    """Whether the lost guard would have kept this very argument off its edge."""
    if view.name == "div" and view.source(1) is None:
        return False  # the divisor is a plain number: no guard was ever in it
    if (became == 1 and guard.name != "rsub") or "norm" in view.name:
        return True
    below = view.input(1 if view.name == "div" else 0)
    return below is None or bool((below == 0).any())


def _at_edge(view: View, became: float) -> str:
    """Say how many of the guarded values are 0, or 1 where that is what the guard became."""
    below = view.input(1 if view.name == "div" else 0)
    found = [(edge, count) for edge in (became, 0.0) if below is not None and (count := int((below.abs() == edge).sum()))]
    return f"{found[0][1]} of {below.numel()} guarded values are {int(found[0][0])}" if found and below is not None else "the guarded value is at its edge"


def _step(dtype: str, near: float) -> str:
    table = {"float16": ("6e-8", "4.9e-4"), "bfloat16": ("9e-41", "3.9e-3"), "float32": ("1.4e-45", "6e-8")}
    return table.get(dtype, ("5e-324", "1e-16"))[int(near)]


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
    fixes = [*_by_hand(view.name), *_normalised(birth, view), *guarded(view.name, dtype), *_tighter(view.name, dtype), _BOUND]
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


def _by_hand(name: str) -> list[Fix]:
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
