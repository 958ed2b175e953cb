"""Family 6, the update: the optimizer's own arithmetic made a bad value."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import LIMITS
from whynan.causes.fixes import Fix
from whynan.records import Phase, Remedy, number

if TYPE_CHECKING:
    from types import CodeType

    from whynan.trace.birth import Birth

_USUAL = {
    True: "a schedule that gives nan takes the root of a negative number, or divides 0 by 0",
    False: "a schedule that gives inf divides by 0, or raises 0 to a negative power",
}


@rule("WN604", "update-not-finite", "update that is not finite", rank=18)
def update_not_finite(scene: Scene) -> Finding | None:
    """The optimizer's arithmetic made a bad value of finite weights and finite gradients.

    What happened
    The update divided by 0 or left its range: Adam with eps=0, an eps of 1e-8 that is 0 in
    float16, an own optimizer without eps, momentum of scaled gradients in float16, gradients
    above 1e19 whose squares float32 cannot hold, a schedule that gave a learning rate of inf or
    nan; or another method of an optimizer did, such as the first step of SAM with a gradient of 0.

    Why the result is non-finite
    Adam divides by sqrt(v) + eps. For a weight whose gradient has been exactly 0, v is 0; if
    eps is 0 as well, the update is 0 / 0. In float16 the square of a gradient below 1.7e-4 is 0
    too.

    Example
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = torch.optim.Adam([w], lr=0.1, eps=0.0)
        >>> (w * torch.tensor([1.0, 0.0])).sum().backward()
        >>> opt.step()
        >>> w.detach()
        tensor([0.9000,    nan])

    Instead
    Use an eps that exists in the dtype (1e-8 in float32, 1e-4 in float16), or float32 weights.
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = torch.optim.Adam([w], lr=0.1, eps=1e-8)
        >>> (w * torch.tensor([1.0, 0.0])).sum().backward()
        >>> opt.step()
        >>> w.detach()
        tensor([0.9000, 1.0000])

    Zeroing bad gradients and stepping is no remedy: momentum and weight decay still move the
    weights.

    How sure
    whynan repeats the update from a copy of weights and state taken before it, finds the first
    bad operation, and reads eps in its dtype. Proven when the update repeated with a larger eps,
    or with one in the denominator of your own optimizer, is finite; otherwise suspected.

    Not this when
    The gradient was bad (family WN5xx), the state was (WN603), or the weights grew over many
    steps (WN605).
    """
    import torch

    birth = scene.birth
    if birth is None:
        return None
    stepped = any(e.kind == "optimizer" for e in scene.program.entries)
    if not stepped and not _in_a_method(scene, birth):
        return _by_hand(birth)
    if birth.leaf is not None or birth.error is not None:
        return None  # or: all of its numbers were finite when it raised
    view = birth.view
    assert view is not None
    evidence = ["weights, gradients and optimizer state are finite before the update"]
    rates = [g.get("lr") for g in scene.optimizer.param_groups] if scene.optimizer is not None else []
    rate = next((r for r in rates if isinstance(r, float | torch.Tensor) and not math.isfinite(r)), None)
    if rate is not None:
        return _bad_rate(scene, float(rate), evidence)
    label = f"{view.name} inside the optimizer made the first non-finite value"
    fixes: list[Fix] = []
    group = scene.optimizer.param_groups[0] if scene.optimizer is not None else {}
    eps = group.get("eps")
    dtype = view.op.dtype
    if eps is not None and view.name in ("div", "addcdiv", "_foreach_addcdiv", "_foreach_div", "reciprocal", "rsqrt", "_fused_adam", "_fused_adamw"):
        lost = _rounds_to_zero(float(eps), dtype)
        if float(eps) == 0 or lost:
            label = f"eps is {'0' if float(eps) == 0 else f'{eps}, which is 0 in {dtype}'}: the update divides by the root of a second moment of 0"
            evidence.append(f"eps {eps} in {dtype} is {0 if lost or not eps else eps}; where the second moment is 0 the update is 0/0 or x/0")
            fixes.append(
                Fix(f"give the optimizer eps={'1e-4' if dtype == 'float16' else '1e-8'}" + (", or keep float32 master weights" if dtype == "float16" else ""))
            )
    kept = list(view.inputs().values())
    zeros = int((kept[-1] == 0).sum()) if kept else 0  # the last argument of all of these is the divisor
    if not fixes and view.name in ("div", "addcdiv", "reciprocal", "rsqrt") and zeros:
        label = f"the update divides by 0: {zeros} of {kept[-1].numel()} divisors are 0"
        fixes.append(Fix("add a small eps to the denominator of the update", "({x} + 1e-8)", {"div": 1, "addcdiv": 2}.get(view.name, 0)))
    factor = view.op.scalars.get("alpha")
    if not fixes and isinstance(factor, float) and not math.isfinite(factor):
        label = f"the optimizer goes {number(factor)} times along its direction: it computed this length itself"
        fixes.append(Fix("lower the learning rate, or bring loss and gradients into a range whose squares are finite"))
    largest = max((float(t.abs().max()) for t in kept if t.numel() and t.is_floating_point()), default=0.0)
    if not fixes and "mul" in view.name and largest**2 > LIMITS.get(dtype, math.inf):
        label = f"the square of a gradient of {number(largest)} is past the range of {dtype} ({number(LIMITS[dtype])})"
        fixes.append(Fix("bring loss and gradients into a range whose squares are finite: other units, a smaller loss weight, or clipping before the update"))
    if not fixes and dtype in ("float16", "bfloat16"):
        limit = LIMITS[dtype]
        label = f"the update leaves the range of {dtype} ({number(limit)})"
        fixes.append(Fix("keep float32 master weights or lower the learning rate"))
    remedies = _try_eps(scene, eps, "1e-4" if dtype == "float16" else "1e-8") if eps is not None and fixes else []
    fixes = [] if remedies else fixes or [Fix("keep the optimizer's denominator away from 0 and its values in range")]
    return Finding(label, evidence, fixes, remedies=remedies, empty=not stepped)  # gradients of 0 have a norm of 0


def _bad_rate(scene: Scene, rate: float, evidence: list[str]) -> Finding:
    """The schedule gave a rate that is no number to step by."""
    lab = scene.lab
    assert lab is not None
    label = f"the learning rate is {number(rate)}"
    before = next((lr for h in reversed(scene.history) if math.isfinite(lr := h.get("lr", math.nan))), None)
    proven = False
    if before is not None:
        evidence.append(f"the last learning rate that was finite is {number(before)}")
        proven = lab.run(around=_With(scene.optimizer.param_groups, "lr", before)).finite
        scene.tried("the update with the last finite learning rate", "the update is finite" if proven else "still not finite")
    if proven:
        evidence.append("with that the update is finite")
    usual = _USUAL[math.isnan(rate)]
    return Finding(label, evidence, [Fix(f"keep the learning rate finite: {usual}")], proven=proven)


def _in_a_method(scene: Scene, birth: Birth) -> bool:
    """Whether gradients were worked on in a method of an optimizer other than its step: SAM moves the weights in one of its own."""
    if birth.phase is not Phase.OPTIMIZER or birth.site is None:
        return False
    classes = {kind for optimizer in scene.optimizers for kind in type(optimizer).__mro__}
    methods = (getattr(inspect.unwrap(value), "__code__", None) for kind in classes for value in vars(kind).values() if callable(value))
    return any(code is not None and _holds(code, birth.site.code) for code in methods)


def _holds(code: CodeType, inner: CodeType) -> bool:
    """Whether a code object was made of the same text as another (a capsule's is compiled once more), or of what stands around it."""
    name = code.co_qualname
    return inner.co_filename == code.co_filename and (inner.co_qualname == name or inner.co_qualname.startswith(f"{name}.<locals>."))


def _by_hand(birth: Birth) -> Finding | None:
    """An update of the program's own that was multiplied by a number which is not finite, in this operation or the one before."""
    view = birth.view
    if view is None or birth.phase is not Phase.OPTIMIZER:
        return None
    numbers = [value for op in (view, *view.parents()) for value in op.op.scalars.values() if isinstance(value, float) and not math.isfinite(value)]
    if not numbers:
        return None
    fix = Fix(f"keep the step size finite: {_USUAL[math.isnan(numbers[0])]}")
    return Finding(f"the update is multiplied by {number(numbers[0])}", ["weights and gradients are finite before the update"], [fix])


class _With:
    """Another number in every group of an optimizer, for a while."""

    def __init__(self, groups: list[dict[str, Any]], key: str, value: float) -> None:
        self.groups, self.key, self.value = groups, key, value
        self.before = [group[key] for group in groups]

    def __enter__(self) -> None:
        for group in self.groups:
            group[self.key] = self.value

    def __exit__(self, *_: object) -> None:
        for group, value in zip(self.groups, self.before, strict=True):
            group[self.key] = value


def _try_eps(scene: Scene, eps: Any, better: str) -> list[Remedy]:
    """Replay the update with another eps; the diff is at the optimizer's construction."""
    from whynan.capsule.sites import resolve
    from whynan.causes.source import expression_at

    lab, groups = scene.lab, scene.optimizer.param_groups
    assert lab is not None
    if float(eps) >= float(better):
        return []

    outcome = lab.run(around=_With(groups, "eps", float(better)))
    fix = Fix(f"give the optimizer eps={better}", better, keyword="eps")
    scene.tried(fix.title, "the update is finite" if outcome.finite else "still not finite")
    expression = expression_at(scene.made_at, resolve(scene.made_at).file) if scene.made_at is not None else None
    change = fix.text(expression) if expression is not None else None
    diff = expression.diff(*change) if expression is not None and change is not None else ""
    return [
        Remedy(
            fix.title,
            diff,
            False,
            "proven" if outcome.finite else "failed",
            f"with eps={better}: the update is finite" if outcome.finite else "still not finite",
        )
    ]


def _rounds_to_zero(value: float, dtype: str) -> bool:
    smallest = {"float16": 2.98e-8, "bfloat16": 4.6e-41, "float32": 7.0e-46}.get(dtype, 0.0)
    return 0 < value < smallest
