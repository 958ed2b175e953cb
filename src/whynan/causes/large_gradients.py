"""Family 5: the gradient grows past the range of its dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.causes.backward import before_clipping, ops_of_node, parts
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import LIMITS, VIEWS, biggest
from whynan.causes.fixes import BRAIN, Fix
from whynan.causes.logarithms import log_fixes
from whynan.causes.ranges import overflowed
from whynan.records import number

if TYPE_CHECKING:
    from whynan.trace.birth import Birth, View


_SOFTEN = "keep the denominator further from 0: a floor under it, or a softening term added to it"
_CALM = "clip or normalise on the way: shorter unrolls, a lower gain, a smaller loss weight"

# backward operations that only multiply and add up: what they make of finite values is not finite by its size alone
_LINEAR = frozenset({"convolution_backward", "mm", "bmm", "addmm", "baddbmm", "mv", "dot", "sum", "cumsum", "index_add", "scatter_add",
                     "embedding_dense_backward", "index_put", "_index_put_impl", "avg_pool2d_backward", "upsample_nearest2d_backward"})  # fmt: skip

_SCALE = 16  # a factor of a loss that is smaller weighs it


@rule("WN503", "gradient-overflow", "gradient past the range of its dtype", rank=54)
def gradient_overflow(scene: Scene) -> Finding | None:
    """The gradient grew past the range of its dtype on the way back.

    What happened
    Loss and activations were finite, but a backward product was larger than the dtype's largest
    number: a long unrolled recurrence, a deep stack with a gain above 1, a loss scale too large
    for float16.

    Why the result is non-finite
    Each layer multiplies the gradient by its own slope; tanh or sin bound the values and not
    that product. float16 ends at 65504, float32 at 3.4e38.

    Example
        >>> x = torch.tensor([0.001], dtype=torch.float16, requires_grad=True)
        >>> y = x * 300 * 300
        >>> y.backward()
        >>> round(y.item()), x.grad
        (90, tensor([inf], dtype=torch.float16))

    Instead
    In float16 scale the loss down, or keep the path and its parameters in float32 or bfloat16.
        >>> x.grad = None
        >>> (x * 300 * 300 * 0.01).backward()
        >>> x.grad
        tensor([900.], dtype=torch.float16)

    In float32 use shorter unrolls, a lower gain or a norm layer. Clipping comes too late: it
    scales by c / inf, which makes the infinite entries NaN and all others 0.
        >>> x.grad = torch.tensor([float("inf")], dtype=torch.float16)
        >>> norm = torch.nn.utils.clip_grad_norm_([x], 1.0)
        >>> x.grad
        tensor([nan], dtype=torch.float16)

    How sure
    whynan computes the backward operation again in float64 on the same inputs. The cause is
    proven when that result is finite and past the range of the dtype, also where no remedy was
    replayed.

    Not this when
    The slope itself is infinite (WN501), forward values overflow (WN202, WN203), the gradient
    norm grew over the last steps (WN605), or a scaler skips for ever (WN606).
    """
    from whynan.trace.saying import called

    found = parts(scene)
    if found is None:
        return None
    birth, forward = found
    view = birth.view
    if view is None or not view.op.backward or any(s.damage for s in view.op.sources):
        return None
    wide = overflowed(view)
    if wide is None or (biggest(wide) < 6e4 and view.name not in _LINEAR):
        return None
    size, dtype = biggest(wide), view.op.dtype
    ends = LIMITS.get(dtype, 0.0)
    limit = {"float16": "65 504", "bfloat16": "3.39e38", "float32": "3.4e38"}.get(dtype) or number(ends)
    name = called(forward.op)
    goes_on = _goes_on(birth)
    what = f"a value on the way to the gradient of {name}" if goes_on else f"the gradient of {name}"
    largest = f"{what} would be" if size >= ends else f"the result of {view.name} would be at most"
    evidence = [f"{largest} {number(size)}, {dtype} ends at {limit}", "in a wider dtype the same operation is finite"]
    fixes = [Fix("scale the loss down, or keep this part in float32")] if dtype == "float16" else [Fix(_advice(forward, view))]
    if dtype == "float16":
        widened = [] if forward.name == "_to_copy" else [Fix("compute this in float32", "{x}.float()", 0)]  # a cast is computed nowhere
        fixes = [*widened, BRAIN, *fixes]
        evidence += _scaled_by_hand(birth)
    if forward.name in _BY_SLOPE:  # of a probability that is next to 0
        fixes = [*log_fixes(forward), *fixes]
    said = f"the gradient {number(size)} is past" if not goes_on else f"a value on the way to the gradient, {number(size)}, is past"
    if size < ends:  # inside of torch's own kernel
        said = "a value on the way to the gradient is past"
    return Finding(f"{said} the range of {dtype}", evidence + before_clipping(scene), fixes, proven=True)


_BY_SLOPE = ("log", "log2", "log10")
_IN_LOGS = "compute in logarithms from the start (logsumexp, log_softmax, log_prob): the slope of log is 1 / x, past the range for so small an x"


def _advice(forward: View, back: View) -> str:
    if _divides_by(forward):
        return _SOFTEN
    coming, x = back.input(0), back.input(1)  # a logarithm's gradient is what comes back to it, divided by its argument
    steep = x is None or not x.numel() or biggest(coming) * float(x.abs().min()) <= 1
    return _IN_LOGS if forward.name in _BY_SLOPE and steep else _CALM


def _scaled_by_hand(birth: Birth) -> list[str]:
    """Say by what number a loss is multiplied before it is gone back from, where that may be a loss scale that nothing lowers."""
    from whynan.capsule.sites import resolve

    for op in reversed(birth.graph.ops):
        factor = op.scalars.get("other")
        if not op.backward and op.name.startswith("aten.mul.") and op.shape == () and isinstance(factor, int | float) and factor >= _SCALE:
            at = f" at line {line}" if (line := resolve(op.site).line) else ""
            scaled = f"the loss is multiplied by {number(float(factor))}{at} (what is told here is the product)"
            return [f"{scaled}: lower that factor, or use torch.amp.GradScaler, which lowers it after an overflow"]
    return []


def _divides_by(forward: View) -> bool:
    """Whether an operation has a denominator, be it written as a negative power."""
    exponent = forward.scalar("exponent")
    return forward.name in ("div", "reciprocal", "rsqrt") or (forward.name == "pow" and isinstance(exponent, int | float) and exponent < 0)


def _goes_on(birth: Birth) -> bool:
    """Whether the formula of a gradient computes on with this value: (a / d) / d may be past the range where the gradient is not."""
    from whynan.trace.birth import View as Made

    assert birth.op is not None
    made = {birth.op.index}
    for op in ops_of_node(birth):
        if any(s.maker in made for s in op.sources):
            if Made(op, birth).name not in VIEWS:
                return True
            made.add(op.index)
    return False
