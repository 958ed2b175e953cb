"""Family 6, over many steps: values that grow, a loss scale that never settles, a rate that loaded state replaced."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import ATTENTION, biggest
from whynan.causes.fixes import Fix
from whynan.causes.handed import given
from whynan.records import Phase, is_of_scale, number

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
    if is_of_scale(scene.symptom):
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


_SHOWN = 5  # values of what grew
_SLOWER = "lower the learning rate, warm it up, or clip the gradient norm (torch.nn.utils.clip_grad_norm_)"
_LOWER = "lower the learning rate, or warm it up; clipping the gradient does not make the steps of this optimizer smaller"
_SECOND_MOMENTS = frozenset({"exp_avg_sq", "square_avg", "exp_inf", "max_exp_avg_sq", "sum"})  # whose step is about the rate, whatever the gradient
_LAYERS = frozenset(f"torch.nn.modules.{kind}" for kind in ("linear", "conv", "rnn", "activation"))
OUT_OF_PROPORTION = 3.0  # a rate this many times the weights of a layer replaces them in one update
LARGE_INPUT = 1e4  # with which ordinary weights may leave the range as well
LARGE = 10.0  # the root mean square of weights that no ordinary training has
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
    (single dips are allowed), by more than 10000 times in all, or three by more than 1e10, and
    a birth that can overflow.
    Or one update was enough: it was as large as the weights are now, and these are past 10 on
    average, or the rate of an optimizer with second moments is past 3 times the weights that
    layers of these shapes are made with. It is suspected: no replay of one step can prove a history.

    Not this when
    The step before was ordinary (WN203, WN503), or the dtype is float16 (WN202). If the rate is
    not the one that was configured, see WN607.
    """
    birth = scene.birth
    if birth is None or birth.op is None or birth.phase is Phase.OPTIMIZER:
        return None
    view = birth.view
    assert view is not None
    if not (view.name in _OVERFLOWING or view.name.startswith(ATTENTION)) or birth.op.dtype == "float16" or not _large(view):
        return None
    what, grown = "loss", _growth([h.get("loss") for h in scene.history])
    if grown is None and not birth.op.backward:
        what, grown = "gradient norm", _growth([h.get("grad_norm") for h in scene.history])
    if grown is None or (len(grown[0]) < 10 and _steep(view)):
        return _one_update(scene, birth.op.dtype)
    series, factor = grown
    lr = next((h["lr"] for h in reversed(scene.history) if h.get("lr") is not None), None)
    rows = {h.get("step") for h in scene.history[-len(series) :]}
    unit = "evaluations" if len(rows) <= len(series) // 2 else "steps"  # several in one step of LBFGS
    evidence = [f"the {what} over the last {len(series)} {unit}: {_shown(series)} → not finite", f"it grew {number(factor)} times"]
    if lr is not None:
        evidence.append(f"the learning rate is {number(lr)}")
    return Finding(
        f"grew {number(factor)} times in {len(series)} {unit}, then past the range of {birth.op.dtype}",
        evidence,
        [Fix(_SLOWER)],
    )


def growth(scene: Scene) -> list[str]:
    """Say that the gradients had grown step by step before an update that they broke."""
    grown = _growth([h.get("grad_norm") for h in scene.history])
    if grown is None:
        return []
    series, factor = grown
    shown = f"the gradient norm over the last {len(series)} steps: {_shown(series)}; it grew {number(factor)} times"
    return [f"{shown}: the update is only where this ended"]


def _shown(series: list[float]) -> str:
    return " → ".join([number(series[0]), "…"] * (len(series) > _SHOWN) + [number(v) for v in series[-_SHOWN:]])


def _one_update(scene: Scene, dtype: str) -> Finding | None:
    """The update before this step replaced the weights: by its size, as far as rate, gradient and the optimizer's state tell it."""
    last = next((h for h in reversed(scene.history) if math.isfinite(h.get("loss", math.nan))), {})  # those since then were left out
    rate, norm, optimizer = last.get("lr"), last.get("grad_norm"), scene.optimizer
    weights = [p.detach() for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
    count = sum(p.numel() for p in weights)
    if not rate or not count:
        return None
    size = math.sqrt(sum(float(p.double().square().sum()) for p in weights if p.is_floating_point()))
    adapts = any(isinstance(kept, dict) and not _SECOND_MOMENTS.isdisjoint(kept) for kept in optimizer.state.values())
    moved = rate * math.sqrt(count) if adapts else rate * norm if norm else 0.0
    share = 30 if adapts else 3  # RMSprop begins with ten times the rate
    if not math.isfinite(size) or not moved >= size / share:
        return None
    beside = _beside_layers(scene, rate) if adapts else ""
    if size < LARGE * math.sqrt(count) and not beside:
        return None
    how = f"on each of {number(count)} weights" if adapts else f"times the gradient norm {number(norm or 0.0)}: {number(moved)}"
    now = f"the weights now have norm {number(size)}, {number(size / math.sqrt(count))} each"
    return Finding(
        f"the update before this step replaced the weights; what they make of the batch is past the range of {dtype}",
        [f"the last update was the learning rate {number(rate)} {how}", now, beside],
        [Fix(_LOWER if beside else _SLOWER)],
    )


def _beside_layers(scene: Scene, rate: float) -> str:
    """Compare the rate with the weights that layers of these shapes are made with, 1 / sqrt(fan in); nothing where it is in proportion.

    A weight that is not a layer's may be of any size: pixels that are optimized, a table of coordinates.
    """
    weights = _layer_weights(scene)
    count = sum(w.numel() for w in weights)
    if not count or any(tensor.is_floating_point() and biggest(tensor) > LARGE_INPUT for _, _, tensor in given(scene.program.entries, _none)):
        return ""
    made = math.sqrt(sum(w.shape[0] for w in weights) / count)
    now = math.sqrt(sum(float(w.double().square().sum()) for w in weights) / count)
    if rate < OUT_OF_PROPORTION * made or now < 2 * made:
        return ""
    return (
        f"layers of these shapes are made with weights near {number(made)}, now they are {number(now)} each; the rate is {number(rate / made)} times the former"
    )


def _layer_weights(scene: Scene) -> list[Any]:
    """Return the matrices and kernels of torch's own layers that the optimizer trains."""
    trained = {id(p) for group in scene.optimizer.param_groups for p in group["params"]}
    layers = [m for root in scene.program.roots for m in root.modules() if type(m).__module__ in _LAYERS]
    found = {id(p): p.detach() for m in layers for p in m.parameters(recurse=False) if p.dim() > 1 and id(p) in trained}
    return list(found.values())


def _none(slot: object) -> None:
    """Of what the step was given, look at what came from outside alone."""


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
    finite = [abs(v) for v in values if v and math.isfinite(v)]  # nothing grows out of a loss of exactly 0: a hinge without a violation
    if len(finite) < 3:
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
    low, high = max(min(run[: max(1, len(run) // 2)]), 1e-12), max(run[-3:])
    usual = max(low, 1e-3 * statistics.median(run))  # one value near 0 is no beginning of a growth
    least = 1e4 if len(run) >= 4 else 1e10  # three are enough where they rise as nothing else does
    return (run, high / low) if len(run) >= 3 and high > least * usual else None


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
