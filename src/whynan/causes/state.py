"""Family 6: something that outlives the step was already bad, or the update made it so."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import LIMITS, biggest
from whynan.causes.fixes import Fix
from whynan.records import Phase, Remedy, number

if TYPE_CHECKING:
    from whynan.trace.birth import View


@rule("WN606", "loss-scale-collapse", "loss scale that never settles", rank=5)
def loss_scale_collapse(scene: Scene) -> Finding | None:
    """The gradient scaler kept shrinking the loss scale and no step was taken.

    What happened
    A scaler halves its scale after each overflow and skips the step. A few skips are ordinary.
    Here a dozen steps in a row overflowed, whatever the scale: the model has not been training.

    Why the result is non-finite
    A scale helps only if the true gradient fits into float16. If it is past 65504 by itself, or
    NaN at any scale, each scaled gradient is non-finite.

    Example
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt, scaler = torch.optim.SGD([w], lr=0.1), torch.amp.GradScaler("cpu")
        >>> def step(target):
        ...     w.grad = None
        ...     loss = (w.half().float() - target).square().sum()
        ...     scaler.scale(loss).backward()
        ...     scaler.step(opt)
        ...     scaler.update()
        >>> for _ in range(20): step(1e9)
        >>> scaler.get_scale(), w.detach()
        (0.0625, tensor([1.]))

    Instead
    Bring the loss to ordinary size (standardised targets, mean instead of sum), or use
    bfloat16.
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> for _ in range(20): step(3.0)
        >>> scaler.get_scale(), w.detach()
        (8192.0, tensor([2.9547]))

    How sure
    whynan counts the steps a scaler skips in a row: after 4 it looks for the place where the
    gradient leaves the range, after 12 it reports this code and shows the scale. It is
    suspected; the values at the place say whether the gradient is too large or undefined.

    Not this when
    Only a few steps were skipped (ordinary), or the place shows an infinite slope (WN501) or an
    overflow in the forward pass (WN202): then repair that.
    """
    if scene.symptom.place != "scaler":
        return None
    scale = float(scene.scaler.get_scale()) if scene.scaler is not None else math.nan
    scales = [h["scale"] for h in scene.history if h.get("scale")]
    evidence = [scene.symptom.detail, f"the scale is {number(scale)}" + (f", it began at {number(scales[0])}" if scales else "")]
    spans = []
    if scene.birth is not None and scene.birth.site is not None:
        from whynan.capsule.sites import resolve

        spans.append(resolve(scene.birth.site, "the gradient leaves the range here"))
    if scene.symptom.name == "scale":
        return Finding(
            f"{scene.symptom.detail}: no step can be taken",
            [scene.symptom.detail, "a scaler multiplies its scale by the backoff factor; one that is not finite stays so"],
            [Fix("give the scaler a finite scale again: load its state from before, or make a new one")],
            proven=True,
            site=scene.site,
        )
    return Finding(
        f"{scene.symptom.detail}: no scale is small enough",
        evidence,
        [Fix("bring the loss down to ordinary size (normalise targets, use a mean instead of a sum), or train in bfloat16")],
        spans,
        site=scene.site,
    )


@rule("WN608", "uninitialised-parameter", "weight that was never given a value", rank=20)
def uninitialised_parameter(scene: Scene) -> Finding | None:
    """A weight was never given a value and held whatever was in memory.

    What happened
    A parameter was made with torch.empty, or on the meta device and moved with to_empty, and
    nothing wrote to it: an init method that was never called, a key missing in the loaded
    state.

    Why the result is non-finite
    Memory that was not written holds arbitrary bits. Read as floats they are often 0, sometimes
    huge, sometimes NaN, and different in each run. Deterministic mode fills them with NaN, so
    that the fault shows every time:

    Example
        >>> torch.use_deterministic_algorithms(True)
        >>> w = torch.nn.Parameter(torch.empty(2))
        >>> torch.use_deterministic_algorithms(False)
        >>> w.detach()
        tensor([nan, nan])

    Instead
    Write every parameter once, with torch.nn.init or a loaded value.
        >>> w = torch.nn.Parameter(torch.empty(4, 2))
        >>> _ = torch.nn.init.kaiming_uniform_(w)
        >>> (torch.ones(1, 2) @ w.T).sum().backward()
        >>> w.isfinite().all().item(), w.grad[0]
        (True, tensor([1., 1.]))

    Loading with strict=True names the keys that are missing.

    How sure
    whynan saw the memory come from torch.empty and no write to it since. The cause is proven by
    that. Garbage that happens to be finite is not noticed by its value.

    Not this when
    The weight had a value and lost it (WN601).
    """
    tensor, name = _bad_parameter(scene)
    if tensor is None or not scene.program.recorder.is_unwritten(tensor):
        return None
    bad = int((~tensor.detach().isfinite()).sum())
    evidence = [f"`{name}` was made by torch.empty and not, or not wholly, written", f"{bad} of {tensor.numel()} values are not finite"]
    return Finding(
        f"`{name}` holds uninitialised memory",
        evidence,
        remedies=_try_values(scene, tensor, "give the weight a value: torch.nn.init, torch.zeros or torch.randn"),
        proven=True,
    )


@rule("WN601", "parameter-not-finite", "weight that was not finite before the step", rank=21)
def parameter_not_finite(scene: Scene) -> Finding | None:
    """A weight was NaN or infinite before the step began.

    What happened
    The damage is older than this step: a checkpoint saved after the model had died, or an
    update with a bad gradient. A test of the norm by isnan lets inf pass, and clipping makes it
    NaN.

    Why the result is non-finite
    Every step reads the weight, so every loss and gradient after it is NaN. Skipping batches or
    zeroing gradients cannot help: the model is dead until the weight is replaced.

    Example
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> opt = torch.optim.SGD([w], lr=0.1)
        >>> w.grad = torch.tensor([float("inf"), 1.0])
        >>> norm = torch.nn.utils.clip_grad_norm_([w], 1.0)
        >>> opt.step()
        >>> w.detach()
        tensor([nan, 1.])

    Instead
    Go back to the last checkpoint whose weights are finite, and step only on a finite norm.
        >>> _ = w.data.copy_(torch.ones(2))  # the checkpoint
        >>> for grad in (torch.tensor([float("inf"), 1.0]), torch.tensor([3.0, 4.0])):
        ...     w.grad = grad
        ...     norm = torch.nn.utils.clip_grad_norm_([w], 1.0)
        ...     if norm.isfinite():
        ...         opt.step()
        >>> w.detach()
        tensor([0.9400, 0.9200])

    How sure
    whynan reads the weights themselves and counts the bad values. The cause is proven by that;
    `not proven` in the report concerns the remedy, which no replay can try. When it happened is
    known only if whynan watched that step.

    Not this when
    The weight was never written (WN608), a buffer is bad (WN602), the optimizer's own
    arithmetic made the value in this step (WN604), or its state was bad (WN603).
    """
    tensor, name = _bad_parameter(scene)
    if tensor is None:
        return None
    bad = int((~tensor.detach().isfinite()).sum())
    evidence = [f"{bad} of {tensor.numel()} values of `{name}` are not finite"]
    if scene.symptom.detail:
        evidence.append(f"{scene.symptom.detail} are affected")
    evidence += _dead_since(scene)
    evidence.append("skipping steps cannot help: every step reads this weight")
    return Finding(
        f"`{name}` is already damaged: {bad} of {tensor.numel()} values",
        evidence,
        remedies=_try_values(scene, tensor, "go back to the last checkpoint whose weights are finite"),
        proven=True,
    )


def _dead_since(scene: Scene) -> list[str]:
    """Say at which of the steps seen the weight was lost: the first of the bad ones that lead up to now."""
    bad = None
    for row in reversed([h for h in scene.history if h.get("step", -1) < scene.step]):
        numbers = {k: row[k] for k in ("loss", "grad_norm") if k in row and not math.isfinite(row[k])}
        if not numbers:
            break
        bad = (int(row["step"]), numbers)
    if bad is None:
        return []
    what = " and ".join(f"a {'gradient norm' if k == 'grad_norm' else k} of {number(v)}" for k, v in bad[1].items())
    return [f"dead since step {bad[0]}: its update was made with {what}"]


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
    """A buffer, such as running statistics, was NaN, infinite or impossible before the step.

    What happened
    A forward pass writes running statistics, also when its step is skipped later. One bad
    batch, or one overflow under autocast, poisons them for good while all weights stay finite.
    A negative running variance counts as well.

    Why the result is non-finite
    running = 0.9 * running + 0.1 * batch keeps a NaN for ever. In training mode BatchNorm does
    not read it, so the damage shows only in evaluation.

    Example
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> _ = norm(torch.tensor([[float("nan"), 1.0], [0.0, 2.0]]))
        >>> norm.running_mean
        tensor([   nan, 0.1500])
        >>> norm.eval()(torch.ones(1, 2)).detach()
        tensor([[   nan, 0.8721]])

    Instead
    Reset the statistics and estimate them again on good batches; the weights can stay.
        >>> norm.reset_running_stats()
        >>> _ = norm.train()(torch.tensor([[1.0, 1.0], [0.0, 2.0]]))
        >>> x = torch.ones(1, 2, requires_grad=True)
        >>> out = norm.eval()(x)
        >>> out.sum().backward()
        >>> out.isfinite().all().item(), (x.grad > 0).all().item()
        (True, True)

    A guard for the step must put the buffers back too, not only leave the weights alone.
    Writing 0 and 1 over the NaN is finite, but they are not the statistics of the data.

    How sure
    whynan reads the buffers themselves and counts the bad values. The cause is proven by that;
    `not proven` in the report concerns the remedy, which no replay can try.

    Not this when
    A weight is bad (WN601), or the batch that goes in now is (WN701): then the buffer was still
    good before this step.
    """
    birth = scene.birth
    if birth is None:
        return None
    if birth.leaf is not None and birth.leaf.role == "buffer":
        tensor, name = birth.leaf.tensor, birth.leaf.name
        bad = int((~tensor.detach().isfinite()).sum())
        return Finding(
            f"buffer `{name}` is already damaged: {bad} of {tensor.numel()} values",
            [f"{bad} of {tensor.numel()} values of `{name}` are not finite", "skipping steps cannot help: every step reads this buffer"],
            remedies=_try_values(scene, tensor, "reset or re-estimate the buffer, or go back to a checkpoint where it is finite", 1.0),
            proven=True,
        )
    view = birth.view
    if view is None or "batch_norm" not in view.name:
        return None
    for name, held in view.inputs().items():
        if "running" in name and (bad := int((~held.isfinite()).sum())):
            words = f"buffer `{name}` is already damaged: {bad} of {held.numel()} values"
            return Finding(words, [words], [Fix("reset or re-estimate the buffer, or go back to a checkpoint where it is finite")], proven=True)
    for index, source in enumerate(view.op.sources):
        variance = view.inputs().get(source.name)
        if variance is not None and "var" in source.name and bool((variance < 0).any()):
            leaf = view.maker(index)
            name = getattr(leaf, "name", "") or source.name
            count = int((variance < 0).sum())
            return Finding(
                f"the running variance `{name}` is negative in {count} of {variance.numel()} channels",
                [f"{count} of {variance.numel()} values of `{name}` are below 0, smallest {number(float(variance.min()))}"],
                [Fix("reset or re-estimate the running statistics")],
                proven=True,
            )
    return None


@rule("WN603", "optimizer-state-not-finite", "optimizer state that was not finite before the step", rank=19)
def optimizer_state_not_finite(scene: Scene) -> Finding | None:
    """Moments or other optimizer state were not finite before the update.

    What happened
    Weights and gradients are finite, but the state they are combined with is not: moments
    stored in half precision or in 8 bits that came back as inf or NaN, or a state saved after a
    bad step.

    Why the result is non-finite
    The update adds the stored moment to the weight, so the next step writes the damage into it.
    An infinite second moment is quieter: the update is x / inf = 0 and the weight never moves.

    Example
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        >>> opt.state[w]["momentum_buffer"] = torch.tensor([70000.0]).half().float()
        >>> w.grad = torch.ones(1)
        >>> opt.step()
        >>> w.detach()
        tensor([-inf])

    Instead
    Clear the state, or load it from an earlier checkpoint; some steps rebuild the moments.
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> opt = torch.optim.SGD([w], lr=0.1, momentum=0.9)
        >>> opt.state.clear()
        >>> w.grad = torch.ones(1)
        >>> opt.step()
        >>> w.detach()
        tensor([0.9000])

    Warm the rate up again: Adam's first steps with fresh moments are as large as the rate
    allows. Save moments in float32 or bfloat16.

    How sure
    whynan reads the state before the update, and weights and gradients beside it. The cause is
    proven by that; `not proven` in the report concerns the remedy.

    Not this when
    The state was finite and the update's arithmetic was not (WN604), or the weight was bad
    before (WN601).
    """
    birth = scene.birth
    bad_state = birth is not None and birth.leaf is not None and birth.leaf.role == "state"
    written = _written_by_state(scene)
    if written is not None:
        return written
    if scene.symptom.place != "optimizer state" and not bad_state:
        return None
    if birth is not None and not bad_state:
        return None
    name = scene.symptom.name if not bad_state or birth is None or birth.leaf is None else birth.leaf.name
    evidence = [f"`{name}` is not finite" + (f" ({scene.symptom.detail})" if scene.symptom.detail else "")]
    return Finding(
        f"{name} is not finite; the update would write it into the weights",
        [*evidence, "weights and gradients are finite"],
        remedies=_try_cleared(scene),
        proven=True,
        site=scene.site,
    )


def _written_by_state(scene: Scene) -> Finding | None:
    """A weight that went bad while whynan watched, every gradient finite: its moments are bad in the same places."""
    birth = scene.birth
    leaf = birth.leaf if birth is not None else None
    watched = scene.history and scene.symptom.place in ("loss", "gradient")  # a weight that was bad from the start is a symptom of its own
    if leaf is None or leaf.role != "parameter" or not watched:
        return None
    if any(not math.isfinite(h.get(key, 0.0)) for h in scene.history for key in ("loss", "grad_norm")):
        return None  # a bad gradient was let through
    damaged = ~leaf.tensor.detach().isfinite()
    for optimizer in scene.optimizers:
        for key, value in optimizer.state.get(leaf.tensor, {}).items():
            if getattr(value, "shape", None) == damaged.shape and bool((damaged & ~value.isfinite()).any()):
                evidence = [f"`{key}` of `{leaf.name}` is not finite where the weight is not", "every gradient so far was finite: the update wrote it there"]
                return Finding(
                    f"`{key}` of `{leaf.name}` is not finite and was written into the weight",
                    evidence,
                    [Fix("go back to the last checkpoint whose weights and optimizer state are finite")],
                    proven=True,
                )
    return None


@rule("WN604", "update-not-finite", "update that is not finite", rank=18)
def update_not_finite(scene: Scene) -> Finding | None:
    """The optimizer's arithmetic made a bad value of finite weights and finite gradients.

    What happened
    The update divided by 0 or left its range: Adam with eps=0, an eps of 1e-8 that is 0 in
    float16, an own optimizer without eps, momentum of scaled gradients in float16.

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
            fixes.append(
                Fix(f"give the optimizer eps={'1e-4' if dtype == 'float16' else '1e-8'}" + (", or keep float32 master weights" if dtype == "float16" else ""))
            )
    kept = list(view.inputs().values())
    zeros = int((kept[-1] == 0).sum()) if kept else 0  # the last argument of all of these is the divisor
    if not fixes and view.name in ("div", "addcdiv", "reciprocal", "rsqrt") and zeros:
        label = f"the update divides by 0: {zeros} of {kept[-1].numel()} divisors are 0"
        fixes.append(Fix("add a small eps to the denominator of the update", "({x} + 1e-8)", {"div": 1, "addcdiv": 2}.get(view.name, 0)))
    if not fixes and dtype in ("float16", "bfloat16"):
        limit = LIMITS[dtype]
        label = f"the update leaves the range of {dtype} ({number(limit)})"
        fixes.append(Fix("keep float32 master weights or lower the learning rate"))
    remedies = _try_eps(scene, eps, "1e-4" if dtype == "float16" else "1e-8") if eps is not None and fixes else []
    return Finding(
        label, evidence, [] if remedies else fixes or [Fix("keep the optimizer's denominator away from 0 and its values in range")], remedies=remedies
    )


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


def _try_values(scene: Scene, tensor: Any, title: str, value: float = 0.0) -> list[Remedy]:
    """Replay the step with the bad values of a weight or buffer replaced by a finite number: nothing else is wrong with it."""
    from torch.autograd import _unsafe_preserve_version_counter  # type: ignore[attr-defined]

    lab = scene.lab
    assert lab is not None

    class Replaced:
        def __enter__(self) -> None:
            # whether the weight was ever written, and a backward pass still to come, go by the version counter
            self.versions = _unsafe_preserve_version_counter(tensor)
            self.versions.__enter__()
            self.before = tensor.detach().clone()
            tensor.detach()[~self.before.isfinite()] = value

        def __exit__(self, *_: object) -> None:
            tensor.detach().copy_(self.before)
            self.versions.__exit__()

    outcome = lab.run(around=Replaced())
    scene.tried(f"the bad values set to {number(value)}", outcome.effect() if outcome.finite else "still not finite")
    if not outcome.finite:
        return [Remedy(title)]
    return [Remedy(title, result="proven", effect=f"with these values finite (set to {number(value)}): {outcome.effect()}")]


def _try_cleared(scene: Scene) -> list[Remedy]:
    """Make the update once with an empty state and once more put everything back."""
    from whynan.capsule.intercept import unwatched_step
    from whynan.capsule.snapshot import Snapshot

    title = "clear the optimizer's state (optimizer.state.clear()) or load it from an earlier checkpoint"
    optimizer, recorder = scene.optimizer, scene.program.recorder
    if optimizer is None:
        return [Remedy(title)]
    step = unwatched_step(optimizer)
    with Snapshot(optimizer):
        optimizer.state.clear()
        try:
            recorder.suspended(step, optimizer)
        except TypeError:
            return [Remedy(title)]  # it wants a closure
        finite = all(bool(p.detach().isfinite().all()) for g in optimizer.param_groups for p in g["params"])
    scene.tried("the same update with an empty optimizer state", "finite" if finite else "still not finite")
    return [
        Remedy(title, result="proven" if finite else "failed", effect="with an empty optimizer state: the update is finite" if finite else "still not finite")
    ]


_OVERFLOWING = frozenset(
    {"mul", "add", "sub", "pow", "mm", "bmm", "addmm", "matmul", "sum", "mean", "mse_loss", "square", "prod", "exp", "dot", "mv", "linear", "convolution",
     "cumprod", "linalg_vector_norm", "norm", "var", "std", "einsum", "baddbmm", "smooth_l1_loss", "sinh", "cosh", "_softmax", "_log_softmax",
     "nll_loss_forward", "huber_loss", "logsumexp", "div", "native_batch_norm", "native_layer_norm", "addcmul", "silu_backward", "threshold_backward",
     "_to_copy", "cumsum", "var_mean"}
)  # fmt: skip


@rule("WN605", "divergence", "values that grew until they left the range", rank=28)
def divergence(scene: Scene) -> Finding | None:
    """Loss, gradients and weights grew step by step until a number no longer fitted its dtype.

    What happened
    Each update overshot the last. The operation that overflowed is only where the growth ended;
    the cause is a learning rate that is too high for this loss, no warm-up, or no clipping.

    Why the result is non-finite
    On a slope of curvature L, gradient descent with a rate above 2 / L multiplies the error by
    more than 1 at every step. Exponential growth leaves any range.

    Example
        >>> def train(rate):
        ...     w = torch.zeros(1, requires_grad=True)
        ...     for step in range(60):
        ...         w.grad = None
        ...         loss = (10 * w - 1).square().mean()
        ...         loss.backward()
        ...         w.data -= rate * w.grad
        ...     return loss.item()
        >>> train(0.5)
        nan

    Instead
    Lower the rate, warm it up, or clip the gradient norm before the step.
        >>> round(train(0.0002), 3)  # it began at 1
        0.008

    A clamp of the loss does not stop it: above the bound the gradient is 0 and training stands
    still. Going back to a good checkpoint without changing the rate repeats the run.

    How sure
    whynan looks at the losses or gradient norms of the steps before: at least four that rise
    (single dips are allowed), by more than 10000 times in all, and a birth that can overflow.
    It is suspected: no replay of one step can prove a history.

    Not this when
    The step before was ordinary (WN203, WN503), or the dtype is float16 (WN202). If the rate is
    not the one that was configured, see WN607.
    """
    birth = scene.birth
    if birth is None or birth.op is None or birth.phase is Phase.OPTIMIZER:
        return None
    view = birth.view
    assert view is not None
    if view.name not in _OVERFLOWING or birth.op.dtype == "float16" or not _large(view):
        return None
    grown = _growth([h.get("loss") for h in scene.history])
    if grown is None and not birth.op.backward:
        grown = _growth([h.get("grad_norm") for h in scene.history])
    if grown is None or (len(grown[0]) < 10 and _steep(view)):
        return None
    series, factor = grown
    lr = next((h["lr"] for h in reversed(scene.history) if h.get("lr") is not None), None)
    shown = " → ".join(number(v) for v in series[-6:])
    rows = {h.get("step") for h in scene.history[-len(series) :]}
    unit = "evaluations" if len(rows) <= len(series) // 2 else "steps"  # several in one step of LBFGS
    evidence = [f"over the last {len(series)} {unit}: {shown} → not finite", f"it grew {number(factor)} times"]
    if lr is not None:
        evidence.append(f"the learning rate is {number(lr)}")
    return Finding(
        f"grew {number(factor)} times in {len(series)} {unit}, then past the range of {birth.op.dtype}",
        evidence,
        [Fix("lower the learning rate, warm it up, or clip the gradient norm (torch.nn.utils.clip_grad_norm_)")],
    )


def _steep(view: View) -> bool:
    """Whether an operation makes overflows of ordinary numbers by itself, so that a short rise before it says little; a square does not."""
    exponent = view.scalar("exponent")
    squares = view.name == "pow" and isinstance(exponent, int | float) and abs(exponent) <= 2
    return view.name in ("exp", "sinh", "cosh", "pow", "prod", "cumprod") and not squares


def _large(view: View) -> bool:
    """Whether an argument is so large that the result can leave the range: 0 / 0 after a rising loss is no divergence."""
    needed = {"exp": 50.0, "sinh": 50.0, "cosh": 50.0, "pow": 1e3, "prod": 10.0, "cumprod": 10.0}.get(view.name, 1e8)
    kept = [t for t in view.inputs().values() if t.is_floating_point() or t.is_complex()]
    return not kept or any(biggest(t) >= needed for t in kept)


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
    """The learning rate in effect was not the configured one: loaded state replaced it.

    What happened
    optimizer.load_state_dict brings back the parameter groups of the checkpoint, with their
    rate; a scheduler's state brings back its base rates and position. The rate in the script is
    then only the one that was replaced.

    Why the result is non-finite
    A rate that is several times higher than intended, on a model that was tuned for less, makes
    values grow until they leave the range (WN605).

    Example
        >>> w = torch.nn.Parameter(torch.ones(1))
        >>> saved = torch.optim.SGD([w], lr=0.5).state_dict()
        >>> opt = torch.optim.SGD([w], lr=1e-4)
        >>> opt.load_state_dict(saved)
        >>> opt.param_groups[0]["lr"]
        0.5

    Instead
    Set the rate again after loading, or print it and make sure that the loaded one is meant.
        >>> for group in opt.param_groups: group["lr"] = 1e-4
        >>> w.grad = torch.ones(1)
        >>> opt.step()
        >>> opt.param_groups[0]["lr"], w.item() < 1
        (0.0001, True)

    Schedulers such as LambdaLR compute it anew from their own base_lrs at the next step: set
    those as well.

    How sure
    Proven: whynan reads the base rates before and after a load, and reports the two numbers at
    the first step that still uses the loaded one. That this rate also causes damage is not
    said: resuming with the saved rate is often right.

    Not this when
    The same base rate comes back with a decayed current one (a normal resume), or a lower rate
    without a base rate beside it (taken for a decayed one), or the script sets the rate again
    before the first step. The rate is the configured one and too high all the same (WN605), or
    the loaded moments are bad (WN603).
    """
    return None  # no step fails by it: `rates` watches the loads and makes the incident
