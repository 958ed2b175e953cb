"""Family 6, the update: the optimizer's own arithmetic made a bad value."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import LIMITS, as_view, is_same, share
from whynan.causes.fixes import Fix
from whynan.causes.held_settings import TRIED, Setting, With, guards, rounds_to_zero, tried
from whynan.causes.optimizer_state import stands_still
from whynan.causes.progress import growth
from whynan.records import Phase, Remedy, number, number_of

if TYPE_CHECKING:
    from types import CodeType

    from whynan.trace.birth import Birth, View

_DIVISIONS = (
    "div",
    "addcdiv",
    "_foreach_addcdiv",
    "_foreach_div",
    "reciprocal",
    "rsqrt",
    "_foreach_reciprocal",
    "_foreach_rsqrt",
    "_fused_adam",
    "_fused_adamw",
)
_SMALLER = "bring loss and gradients into a range whose squares are finite: other units, a smaller loss weight, or clipping before the update"
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
    bad operation, and reads eps (or epsilon, damping, one of a tuple) in its dtype. Proven when
    the update repeated with a larger one, or with one in the denominator of your own optimizer,
    is finite; otherwise suspected.

    Not this when
    The gradient was bad (family WN5xx), the state was (WN603), or the weights grew over many
    steps (WN605). A guard that rounds to 0 in a formula of the model or the loss is WN204.
    """
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
    rates = [number_of(g.get("lr")) for g in scene.optimizer.param_groups] if scene.optimizer is not None else []
    rate = next((r for r in rates if r is not None and not math.isfinite(r)), None)
    if rate is not None:
        return _bad_rate(scene, rate, evidence)
    lost, remedies = _lost_guard(scene, view)
    if lost is not None:
        added = _added(view, lost)
        label, why = (_divides(view, lost), _why(view, lost)) if added is None else _vanished(view, lost, added)
        return Finding(label, [*evidence, why], remedies=remedies, empty=not stepped)  # gradients of 0 have a norm of 0
    label, fixes = _otherwise(view)
    remedies = _smaller_than_usual(scene, view.op.dtype) if fixes and fixes[0].title != _SMALLER else []  # no guard makes a square smaller
    fixes = [] if remedies else fixes or [Fix("keep the optimizer's denominator away from 0 and its values in range")]
    title, words = _after_it(scene) if stepped else ("", [])
    return Finding(label, [*evidence, *words, *growth(scene)], fixes, remedies=remedies, empty=not stepped, title=title)


def _lost_guard(scene: Scene, view: View) -> tuple[Setting | None, list[Remedy]]:
    """Return the guard in the optimizer's groups that is 0 and without which this operation meets a 0, and the update with another one.

    By trial, where there are several: each stands in a place of its own.
    """
    if scene.optimizer is None or not (view.name in _DIVISIONS or _negative_power(view) is not None):
        return None, []
    dtype = view.op.dtype
    lost = [setting for setting in guards(scene.optimizer) if setting.is_lost(dtype)]
    played = [(setting, remedy) for setting in lost[:TRIED] if (remedy := tried(scene, setting, dtype)) is not None]
    for setting, remedy in played:
        if remedy.result == "proven":
            return setting, [remedy]
    return (played[0][0], [played[0][1]]) if len(played) == 1 and played[0][0].key == "eps" and view.name in _DIVISIONS else (None, [])


def _divides(view: View, setting: Setting) -> str:
    """Say what the update does without a guard."""
    power = _negative_power(view)
    if power is not None:
        return f"{setting.became(view.op.dtype)}: the update raises 0 to the power {number(power)}"
    what = "the root of 0" if "rsqrt" in view.name else "the root of a second moment of 0" if setting.name == "eps" else "0"
    return f"{setting.became(view.op.dtype)}: the update divides by {what}"


def _added(view: View, setting: Setting) -> float | None:
    """Return what is added to a divisor, where the optimizer makes another number of its guard first."""
    makers = (as_view(view.maker(i)) for i in range(len(view.op.sources) - 1, -1, -1))
    added = next((made.scalar("other") for made in makers if made is not None and made.name == "add"), None)
    return added if isinstance(added, float) and not math.isclose(added, setting.value, rel_tol=1e-6) and rounds_to_zero(added, view.op.dtype) else None


def _vanished(view: View, setting: Setting, added: float) -> tuple[str, str]:
    label = f"{number(added)}, which is 0 in {view.op.dtype}, is all that keeps the divisor above 0: what it is added to is 0"
    return label, f"the optimizer makes {number(added)} of {setting.name}={number(setting.value)} before it adds it"


def _why(view: View, setting: Setting) -> str:
    dtype = view.op.dtype
    if setting.name != "eps" or _negative_power(view) is not None or "rsqrt" in view.name:
        where = f"{setting.name} of the optimizer's settings should keep what is divided by above 0, and is {number(setting.value)}"
    else:
        where = f"eps {setting.whole} in {dtype} is 0; where the second moment is 0 the update is 0/0 or x/0"
    return where if setting.value == 0 else f"{where}; a guard that rounds to 0 in a formula is WN204, this one is the optimizer's own"


def _negative_power(view: View) -> float | None:
    """Return the exponent of a power of 0 that is below 0."""
    exponent, base = view.scalar("exponent"), view.input("self")
    if not isinstance(exponent, int | float) or exponent >= 0 or "pow" not in view.name:
        return None
    return float(exponent) if base is not None and bool((base == 0).any()) else None


def _smaller_than_usual(scene: Scene, dtype: str) -> list[Remedy]:
    """Try a larger eps where there is one that is small."""
    eps = [s for s in guards(scene.optimizer) if s.name == "eps"] if scene.optimizer is not None else []
    remedies = [tried(scene, s, dtype) for s in eps]
    return [r for r in remedies if r is not None]


def _otherwise(view: View) -> tuple[str, list[Fix]]:
    """Say what the update does wrong that is no setting's fault."""
    dtype = view.op.dtype
    kept = list(view.inputs().values())
    zeros = int((kept[-1] == 0).sum()) if kept else 0  # the last argument of all of these is the divisor
    if view.name in ("div", "addcdiv", "reciprocal", "rsqrt") and zeros:
        fix = Fix("add a small eps to the denominator of the update", "({x} + 1e-8)", {"div": 1, "addcdiv": 2}.get(view.name, 0))
        return f"the update divides by 0: {zeros} of {kept[-1].numel()} divisors are 0", [fix]
    if (power := _negative_power(view)) is not None:
        label = f"the update raises 0 to the power {number(power)}: {share(zeros, kept[0], 'bases are 0')}"
        return label, [Fix("add a small number to the base", "({x} + 1e-8)", 0)]
    factor = view.op.scalars.get("alpha")
    if isinstance(factor, float) and not math.isfinite(factor):
        label = f"the optimizer goes {number(factor)} times along its direction: it computed this length itself"
        return label, [Fix("lower the learning rate, or bring loss and gradients into a range whose squares are finite")]
    if too_large := _too_large(view):
        return f"{too_large} is past the range of {dtype} ({number(LIMITS[dtype])})", [Fix(_SMALLER)]
    if dtype in ("float16", "bfloat16"):
        return f"the update leaves the range of {dtype} ({number(LIMITS[dtype])})", [Fix("keep float32 master weights or lower the learning rate")]
    return f"{view.name} inside the optimizer made the first non-finite value", []


def _too_large(view: View) -> str:
    """Name the product of an update that leaves the range: the square of a gradient, or what else is multiplied."""
    from whynan.causes.naming import names_of

    called, kept = names_of(view, None), view.inputs()
    factors = [name for name in (("tensor1", "tensor2") if view.name == "addcmul" else kept) if name in kept and kept[name].numel()]
    if "mul" not in view.name or not factors or any(not kept[name].is_floating_point() for name in factors):
        return ""
    largest = [float(kept[name].flatten()[kept[name].abs().argmax()]) for name in factors]
    if abs(largest[0] * largest[-1]) <= LIMITS.get(view.op.dtype, math.inf):
        return ""
    if len(factors) == 2 and is_same(view.maker(factors[0]), view.maker(factors[1])):
        return f"the square of a {called.get(factors[0], 'value')} of {number(largest[0])}"
    return f"a product of numbers as large as {number(max(map(abs, largest)))}"


def _after_it(scene: Scene) -> tuple[str, list[str]]:
    """Say what is made of an update that breaks the optimizer's own state alone, as a title and in words: it goes unnoticed."""
    key, found, _ = scene.symptom.name.partition(" of parameter ")
    if not found or scene.optimizer is None:
        return "", []
    bad = {"inf": "infinite", "nan": "nan"}.get(scene.symptom.kind, "not finite")
    still = "; what is divided by it is 0, and these weights would not move again" if stands_still(scene) else ""
    return f"update that makes the optimizer's `{key}` {bad}", [f"the weights stay finite, `{key}` does not{still}"]


def _bad_rate(scene: Scene, rate: float, evidence: list[str]) -> Finding:
    """The schedule gave a rate that is no number to step by."""
    lab = scene.lab
    assert lab is not None
    label = f"the learning rate is {number(rate)}"
    before = next((lr for h in reversed(scene.history) if math.isfinite(lr := h.get("lr", math.nan))), None)
    proven = False
    if before is not None:
        evidence.append(f"the last learning rate that was finite is {number(before)}")
        proven = lab.run(around=With(scene.optimizer.param_groups, "lr", before)).finite
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
