"""Family 5: the forward pass and the loss are finite, the gradient is not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from whynan.causes.arguments import from_spans
from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import LIMITS, SELECTS, VIEWS, as_view, at_or_below, biggest, consumers, divides, doubled, rows, share, zeros, zeros_and_ones
from whynan.causes.fixes import BRAIN, Fix, guarded
from whynan.causes.logarithms import log_fixes
from whynan.causes.ranges import overflowed
from whynan.records import Phase, number

if TYPE_CHECKING:
    from whynan.trace.birth import Birth, View

_DECOMPOSITIONS = ("linalg_eigh", "_linalg_eigh", "linalg_svd", "_linalg_svd", "linalg_eig", "linalg_qr", "symeig", "linalg_cholesky_ex")
_TRIANGULAR = {"linalg_qr": ("qr", "R"), "linalg_cholesky_ex": ("cholesky", "L")}  # and the factor that their gradient solves with
_DECIDE = ("gt", "lt", "ge", "le", "ne", "eq", "logical_not", "_to_copy", "bitwise_and", "bitwise_not")  # what makes a mask
_EDGES = {
    "sqrt": 0.0,
    "log": 0.0,
    "pow": 0.0,
    "rsqrt": 0.0,
    "log2": 0.0,
    "log10": 0.0,
    "log1p": -1.0,
    "reciprocal": 0.0,
    "xlogy": 0.0,
    "special_entr": 0.0,
    "acosh": 1.0,
}


def _parts(scene: Scene) -> tuple[Birth, View] | None:
    birth = scene.birth
    if birth is None or birth.op is None or birth.error is not None:
        return None
    if birth.op.live and birth.op.backward:
        return None  # a backward written by the user: its arithmetic is judged like a forward pass
    forward = birth.forward
    finite_loss = all(v == v and abs(v) != float("inf") for v in birth.losses) and bool(birth.losses)
    if forward is None or not (birth.op.backward or (finite_loss and scene.symptom.place in ("gradient", "scaler") and birth.phase is not Phase.OPTIMIZER)):
        return None
    return birth, forward


_NOT_VECTORS = "build the loss on the values or on a projector instead of single vectors, or add a little noise to the matrix"


@rule("WN504", "degenerate-decomposition", "gradient of a degenerate decomposition", rank=37)
def degenerate_decomposition(scene: Scene) -> Finding | None:
    """The gradient of a decomposition was divided by 0: by the distance of two equal values, or by a singular factor.

    What happened
    eigh, eig or svd had a finite result, and a loss used its vectors. Two eigenvalues or
    singular values coincided: an identity matrix, a covariance without preferred direction.
    Or qr or cholesky met a singular matrix: columns that are 0 or depend on each other.

    Why the result is non-finite
    The gradient of the vectors contains 1 / (value i - value j). Where the values are equal the
    vectors are not unique, so no gradient exists. The gradient of qr and of cholesky solves with
    their triangular factor, which has a 0 on its diagonal where the matrix is singular.

    Example
        >>> a = torch.eye(2, requires_grad=True)
        >>> v = torch.linalg.eigh(a)[1][:, :1]
        >>> (v @ v.T)[0, 1].backward()
        >>> a.grad.isnan().all().item()
        True

    Instead
    Use the values only, or what does not need single vectors: their gradient is well defined.
        >>> a.grad = None
        >>> torch.linalg.eigvalsh(a).square().sum().backward()
        >>> a.grad.tolist()
        [[2.0, 0.0], [0.0, 2.0]]

    If the vectors are needed, separate the values; the gradient grows as 1 / distance.
        >>> a.grad = None
        >>> v = torch.linalg.eigh(a + torch.diag(torch.tensor([0.0, 0.01])))[1][:, :1]
        >>> (v @ v.T)[0, 1].backward()
        >>> a.grad[0, 1].round().item()
        -50.0

    Before qr and cholesky add a small multiple of the identity.

    How sure
    whynan shows the smallest distance between two values of the matrix, or how many matrices are
    singular. Proven when the step, replayed with a small spread on the diagonal, has finite
    gradients that are alive; otherwise suspected. Rounding can leave 1e-8 instead of 0: a finite
    gradient without meaning.

    Not this when
    The forward pass fails or is infinite (WN108), or the root or logarithm of an eigenvalue of
    0 is at fault (WN501, WN101).
    """
    found = _parts(scene)
    if found is None or not found[0].op or not found[0].op.backward:
        return None
    _, forward = found
    if forward.name not in _DECOMPOSITIONS:
        return None
    if forward.name in _TRIANGULAR:
        return _singular_factor(forward)
    matrix = forward.input(0)
    evidence = []
    if matrix is not None:
        import torch

        try:
            values = torch.linalg.svdvals(doubled(matrix))
            gap = float((values[..., :-1] - values[..., 1:]).abs().min()) if values.shape[-1] > 1 else 0.0
            evidence.append(f"the smallest distance between two values is {number(gap)}")
        except RuntimeError:
            pass
    name = forward.call.rsplit(".", 1)[-1].removeprefix("linalg_")
    return Finding(
        "two values coincide: the gradient divides by their difference",
        evidence,
        [*(guarded(name, forward.op.dtype) or guarded("eigh", forward.op.dtype)), Fix(_NOT_VECTORS)],
        from_spans(forward),
    )


def _singular_factor(forward: View) -> Finding:
    """The gradient of qr and of cholesky solves with the triangular factor that they give."""
    import torch

    name, factor = _TRIANGULAR[forward.name]
    matrix, evidence = forward.input(0), []
    if matrix is not None and matrix.isfinite().all():
        wide = doubled(matrix)
        rank = torch.linalg.matrix_rank(wide, rtol=max(matrix.shape[-2:]) * torch.finfo(matrix.dtype).eps)
        full = min(matrix.shape[-2:])
        count = int((rank < full).sum())
        what = "the matrix is" if rank.numel() == 1 else f"{count} of {rank.numel()} matrices are"
        evidence = [f"{what} singular: rank {int(rank.min())} of {full}"] if count else []
    label = f"the gradient of {name} solves with {factor}, which is singular: its diagonal holds a 0"
    return Finding(label, evidence, guarded(name, forward.op.dtype), from_spans(forward))


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
    found = _parts(scene)
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
    argument, edge = forward.input(0), _EDGES.get(forward.name)
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
    return guarded(forward.name, forward.op.dtype, float(exponent) if isinstance(exponent, int | float) else None)


def _selector(birth: Birth, forward: View) -> View | None:
    """Return the selecting operation that took the output of a forward operation."""
    level = [forward]
    for _ in range(4):
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


def _node_ops(birth: Birth) -> list[Any]:
    assert birth.op is not None
    return [op for op in birth.graph.ops if op.backward and op.node == birth.op.node and op.entry == birth.op.entry]


def _incoming(birth: Birth) -> Any:
    """Return the gradient that came into the node of the birth, from the kept values."""
    inside = {op.index for op in _node_ops(birth)}
    for op in _node_ops(birth):
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


_NO_BRANCH = frozenset({"mul", "select", "slice", "min", "max", "amin", "amax", "sort", "topk"})  # what is picked by size was not meant to be left out
_LIMITING = frozenset({"clamp", "clamp_min", "clamp_max", "minimum", "maximum"})
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

    found = _parts(scene)
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
    return Finding(f"{said} the range of {dtype}", evidence + _before_clipping(scene), fixes, proven=True)


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
    for op in _node_ops(birth):
        if any(s.maker in made for s in op.sources):
            if Made(op, birth).name not in VIEWS:
                return True
            made.add(op.index)
    return False


def _before_clipping(scene: Scene) -> list[str]:
    """Say what clipping would have made of an infinite gradient, and whose it was: after it nobody can tell."""
    if scene.symptom.kind != "inf" or scene.symptom.place != "gradient" or all(e.kind != "clip" for e in scene.program.entries):
        return []
    whose = f"the gradient of `{scene.symptom.name}` was infinite before clipping" + (f" ({scene.symptom.detail})" if scene.symptom.detail else "")
    return [whose, "clipping by a norm of inf multiplies it by 0: that is nan, and the update writes it into the weight"]


def _alive(name: str, dtype: str) -> list[Fix]:
    """Return the changes that keep the gradient of an entry at the edge; a clamp would set it to 0 for good."""
    if name == "pow":
        return [
            Fix("add the logarithms and take exp last: the same loss and the true gradient", "{inner}", safe=True, inner="log of powers by hand"),
            Fix("take the power in log space: the same value and the true gradient", "{inner}", safe=True, inner="powers by hand"),
        ]
    if name == "sqrt":
        eps = "1e-4" if dtype == "float16" else "1e-6"
        return [Fix(f"add {eps} inside the root: the slope is finite and the entry can still learn", f"{{x}} + {eps}", 0)]
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
    found = _parts(scene)
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
    edge = 1.0 if forward.name in ("acos", "asin", "atanh") else _EDGES.get(forward.name)
    if argument is not None and edge is not None:
        at = at_or_below(argument, edge)
        if forward.name in ("acos", "asin", "atanh"):
            at = at_or_below(argument, -edge) | at_or_below(-argument, -edge)
        count = int(at.sum())
        if count:
            empty = count == argument.numel()  # every argument is at the edge: the true gradient may be 0
            place = rows(at)
            evidence.append(
                share(count, argument, f"arguments of {name} are {'at ±1' if edge == 1.0 and name != 'acosh' else number(edge)}")
                + (f" ({place})" if place else "")
            )
            what = f"x^{number(power)}" if forward.name == "pow" and power is not None else name
            after = "and so is the gradient" if scene.symptom.kind == "inf" else "inf * 0 is nan"
            label = f"the slope of {what} at {number(edge)} is infinite{',' if after[0] == 'a' else ';'} {after}"
    evidence.append(_before_it(scene, birth, forward))
    evidence += _before_clipping(scene)
    fixes = [*_alive(forward.name, forward.op.dtype), *guarded(forward.name, forward.op.dtype, power)]
    if forward.name == "sqrt" or (forward.name == "pow" and power == 0.5):
        fixes.insert(0, Fix("use the norm, which defines the slope at 0 as 0", "torch.linalg.vector_norm({inner})", safe=True, inner="sumsq"))
    return Finding(label, evidence, fixes, from_spans(forward), empty=empty)


def _before_it(scene: Scene, birth: Birth, forward: View) -> str:
    """Say what was finite; the loss is not where a gradient that was taken inside the step goes into it."""
    if not birth.losses:
        return "the forward pass is finite"
    loss = birth.losses[-1] / (scene.lab.scale if scene.lab is not None else 1.0)
    if math.isfinite(loss):
        result = forward.output()
        hidden = result is not None and not result.isfinite().all()  # log(0) in a mean that exp makes 0 of
        return f"the loss ({number(loss)}) is finite" if hidden else f"the forward pass and the loss ({number(loss)}) are finite"
    return f"the values that this gradient is taken of are finite; it goes into the loss, which is {number(loss)} by it"
