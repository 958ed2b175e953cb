"""Family 6: something that outlives the step was already bad, or the update made it so."""

from __future__ import annotations

import math
from typing import Any

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import LIMITS
from whynan.causes.fixes import Fix
from whynan.records import Phase, Remedy, number


@rule("WN606", "loss-scale-collapse", "loss scale that never settles", rank=5)
def loss_scale_collapse(scene: Scene) -> Finding | None:
    """The gradient scaler keeps shrinking the loss scale and no step is ever taken."""
    if scene.symptom.place != "scaler":
        return None
    scale = float(scene.scaler.get_scale()) if scene.scaler is not None else math.nan
    scales = [h["scale"] for h in scene.history if h.get("scale")]
    evidence = [scene.symptom.detail, f"the scale is {number(scale)}" + (f", it began at {number(scales[0])}" if scales else "")]
    spans = []
    if scene.birth is not None and scene.birth.site is not None:
        from whynan.capsule.sites import resolve

        spans.append(resolve(scene.birth.site, "the gradient leaves the range here"))
    return Finding(
        f"{scene.symptom.detail}: no scale is small enough",
        evidence,
        [Fix("bring the loss down to ordinary size (normalise targets, use a mean instead of a sum), or train in bfloat16")],
        spans,
        site=scene.site,
    )


@rule("WN608", "uninitialised-parameter", "weight that was never given a value", rank=20)
def uninitialised_parameter(scene: Scene) -> Finding | None:
    """A parameter still holds whatever was in memory when it was made with `torch.empty`."""
    tensor, name = _bad_parameter(scene)
    if tensor is None or not scene.program.recorder.is_unwritten(tensor):
        return None
    bad = int((~tensor.detach().isfinite()).sum())
    evidence = [f"`{name}` was made by torch.empty and not, or not wholly, written", f"{bad} of {tensor.numel()} values are not finite"]
    return Finding(f"`{name}` holds uninitialised memory", evidence, [Fix("give the weight a value: torch.nn.init, torch.zeros or torch.randn")], proven=True)


@rule("WN601", "parameter-not-finite", "weight that was not finite before the step", rank=21)
def parameter_not_finite(scene: Scene) -> Finding | None:
    """A weight was NaN or infinite before the step began."""
    tensor, name = _bad_parameter(scene)
    if tensor is None:
        return None
    bad = int((~tensor.detach().isfinite()).sum())
    evidence = [f"{bad} of {tensor.numel()} values of `{name}` are not finite"]
    if scene.symptom.detail:
        evidence.append(f"{scene.symptom.detail} are affected")
    evidence.append("skipping steps cannot help: every step reads this weight")
    return Finding(f"`{name}` is already damaged: {bad} of {tensor.numel()} values", evidence, [Fix("go back to the last checkpoint whose weights are finite")], proven=True)


def _bad_parameter(scene: Scene) -> tuple[Any, str]:
    birth = scene.birth
    if birth is not None and birth.leaf is not None and birth.leaf.role == "parameter":
        return birth.leaf.tensor, birth.leaf.name or f"weight {list(birth.leaf.tensor.shape)}"
    if birth is None and scene.symptom.place == "parameter":
        for root in scene.program.roots:
            for name, parameter in root.named_parameters():
                if not bool(parameter.detach().isfinite().all()):
                    return parameter, name
    return None, ""


@rule("WN602", "buffer-not-finite", "buffer that was not finite before the step", rank=22)
def buffer_not_finite(scene: Scene) -> Finding | None:
    """Running statistics or another buffer were NaN, infinite or impossible before the step began."""
    birth = scene.birth
    if birth is None:
        return None
    if birth.leaf is not None and birth.leaf.role == "buffer":
        tensor, name = birth.leaf.tensor, birth.leaf.name
        bad = int((~tensor.detach().isfinite()).sum())
        return Finding(
            f"buffer `{name}` is already damaged: {bad} of {tensor.numel()} values",
            [f"{bad} of {tensor.numel()} values of `{name}` are not finite", "skipping steps cannot help: every step reads this buffer"],
            [Fix("reset or re-estimate the buffer, or go back to a checkpoint where it is finite")],
            proven=True,
        )
    view = birth.view
    if view is None or "batch_norm" not in view.name:
        return None
    for index, source in enumerate(view.op.sources):
        tensor = view.inputs().get(source.name)
        if tensor is not None and "var" in source.name and source.maker < 0 and bool((tensor < 0).any()):
            leaf = view.maker(index)
            name = getattr(leaf, "name", "") or source.name
            count = int((tensor < 0).sum())
            return Finding(
                f"the running variance `{name}` is negative in {count} of {tensor.numel()} channels",
                [f"{count} of {tensor.numel()} values of `{name}` are below 0, smallest {number(float(tensor.min()))}"],
                [Fix("reset or re-estimate the running statistics")],
                proven=True,
            )
    return None


@rule("WN603", "optimizer-state-not-finite", "optimizer state that was not finite before the step", rank=19)
def optimizer_state_not_finite(scene: Scene) -> Finding | None:
    """Moments or other optimizer state were NaN or infinite before the update."""
    birth = scene.birth
    bad_state = birth is not None and birth.leaf is not None and birth.leaf.role == "state"
    if scene.symptom.place != "optimizer state" and not bad_state:
        return None
    if birth is not None and not bad_state:
        return None
    name = scene.symptom.name if not bad_state or birth is None or birth.leaf is None else birth.leaf.name
    evidence = [f"`{name}` is not finite" + (f" ({scene.symptom.detail})" if scene.symptom.detail else "")]
    return Finding(
        f"{name} is not finite; the update would write it into the weights",
        [*evidence, "weights and gradients are finite"],
        [Fix("clear the optimizer's state (optimizer.state.clear()) or load it from an earlier checkpoint")],
        proven=True,
        site=scene.site,
    )


@rule("WN604", "update-not-finite", "update that is not finite", rank=18)
def update_not_finite(scene: Scene) -> Finding | None:
    """Finite weights and finite gradients went in, the optimizer's arithmetic made the bad value."""
    birth = scene.birth
    if birth is None or not any(e.kind == "optimizer" for e in scene.program.entries):
        return None
    if birth.leaf is not None:
        return None
    view = birth.view
    assert view is not None
    evidence = ["weights, gradients and optimizer state are finite before the update"]
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
            fixes.append(Fix(f"give the optimizer eps={'1e-4' if dtype == 'float16' else '1e-8'}" + (", or keep float32 master weights" if dtype == "float16" else "")))
    kept = view.inputs()
    zero = [n for n, t in kept.items() if int((t == 0).sum())]
    if not fixes and view.name in ("div", "addcdiv", "reciprocal", "rsqrt") and zero:
        label = f"the update divides by 0: {zero[-1]} has {int((kept[zero[-1]] == 0).sum())} zeros"
        fixes.append(Fix("add a small eps to the denominator of the update"))
    if not fixes and dtype in ("float16", "bfloat16"):
        limit = LIMITS[dtype]
        label = f"the update leaves the range of {dtype} ({number(limit)})"
        fixes.append(Fix("keep float32 master weights or lower the learning rate"))
    remedies = _try_eps(scene, eps, "1e-4" if dtype == "float16" else "1e-8") if eps is not None and fixes else []
    return Finding(label, evidence, [] if remedies else fixes or [Fix("keep the optimizer's denominator away from 0 and its values in range")], remedies=remedies)


def _try_eps(scene: Scene, eps: Any, better: str) -> list[Remedy]:
    """Replay the update with another eps; the diff is at the optimizer's construction."""
    from whynan.capsule.sites import resolve
    from whynan.causes.source import expression_at

    lab, groups = scene.lab, scene.optimizer.param_groups
    assert lab is not None
    if float(eps) >= float(better):
        return []

    class Changed:
        def __enter__(self) -> None:
            for group in groups:
                group["eps"] = float(better)

        def __exit__(self, *_: object) -> None:
            for group in groups:
                group["eps"] = eps

    outcome = lab.run(around=Changed())
    fix = Fix(f"give the optimizer eps={better}", better, keyword="eps")
    scene.tried(fix.title, "the update is finite" if outcome.finite else "still not finite")
    expression = expression_at(scene.made_at, resolve(scene.made_at).file) if scene.made_at is not None else None
    change = fix.text(expression) if expression is not None else None
    diff = expression.diff(*change) if expression is not None and change is not None else ""
    return [Remedy(fix.title, diff, False, "proven" if outcome.finite else "failed", "the update is finite" if outcome.finite else "still not finite")]


def _rounds_to_zero(value: float, dtype: str) -> bool:
    smallest = {"float16": 2.98e-8, "bfloat16": 4.6e-41, "float32": 7.0e-46}.get(dtype, 0.0)
    return 0 < value < smallest


_OVERFLOWING = frozenset(
    {"mul", "add", "sub", "pow", "mm", "bmm", "addmm", "matmul", "sum", "mean", "mse_loss", "square", "prod", "exp", "dot", "mv", "linear", "convolution", "cumprod",
     "linalg_vector_norm", "norm", "var", "std", "einsum", "baddbmm", "smooth_l1_loss", "sinh", "cosh", "_softmax", "_log_softmax", "nll_loss_forward", "huber_loss",
     "logsumexp", "cosh", "div", "native_batch_norm", "native_layer_norm", "addcmul", "silu_backward", "threshold_backward", "_to_copy", "cumsum", "var_mean"}
)  # fmt: skip


@rule("WN605", "divergence", "values that grew until they left the range", rank=28)
def divergence(scene: Scene) -> Finding | None:
    """Loss, gradients and weights grew step by step until a number no longer fitted its dtype."""
    birth = scene.birth
    if birth is None or birth.op is None or birth.phase is Phase.OPTIMIZER:
        return None
    view = birth.view
    assert view is not None
    if view.name not in _OVERFLOWING or birth.op.dtype == "float16":
        return None
    grown = _growth([h.get("loss") for h in scene.history])
    if grown is None and not birth.op.backward:
        grown = _growth([h.get("grad_norm") for h in scene.history])
    if grown is None or (len(grown[0]) < 10 and view.name in ("exp", "sinh", "cosh", "pow", "prod", "cumprod")):
        return None
    series, factor = grown
    lr = next((h["lr"] for h in reversed(scene.history) if h.get("lr") is not None), None)
    shown = " → ".join(number(v) for v in series[-6:])
    evidence = [f"over the last {len(series)} steps: {shown} → not finite", f"it grew {number(factor)} times"]
    if lr is not None:
        evidence.append(f"the learning rate is {number(lr)}")
    return Finding(
        f"grew {number(factor)} times in {len(series)} steps, then past the range of {birth.op.dtype}",
        evidence,
        [Fix("lower the learning rate, warm it up, or clip the gradient norm (torch.nn.utils.clip_grad_norm_)")],
    )


def _growth(values: list[float | None]) -> tuple[list[float], float] | None:
    """Return the run of rising values at the end and by how much they rose, if that is divergence."""
    finite = [abs(v) for v in values if v is not None and math.isfinite(v)]
    if len(finite) < 4:
        return None
    run = [finite[-1]]
    misses = 0
    for value in reversed(finite[:-1]):
        if value > run[-1] * 1.0:
            misses += 1
            if misses > max(2, len(run) // 4):
                break
        run.append(value)
    run.reverse()
    low = max(min(run[: max(1, len(run) // 2)]), 1e-12)
    factor = max(run[-3:]) / low
    return (run, factor) if len(run) >= 4 and factor > 1e4 else None


@rule("WN607", "learning-rate-overridden", "learning rate replaced by loaded state", rank=90)
def learning_rate_overridden(scene: Scene) -> Finding | None:
    """A loaded optimizer or scheduler state replaced the learning rate the script configured."""
    return None
