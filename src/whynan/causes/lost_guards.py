"""Family 2: a small number that should have kept a value off its edge is lost in the dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.causes.arguments import forward_view
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import ELEMENTWISE, lineage
from whynan.causes.fixes import Fix, guarded
from whynan.records import number

if TYPE_CHECKING:
    from whynan.records import Span
    from whynan.trace.birth import View


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
