"""Family 6: something that outlives the step was bad before it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import as_entries, rows
from whynan.causes.fixes import Fix
from whynan.causes.weighing import UNCOUNTED, bad_weight, is_loss, is_weight, used_at
from whynan.records import Remedy, number

if TYPE_CHECKING:
    from whynan.trace.graph import Leaf


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
    blanks = scene.program.recorder.blanks
    if tensor is None or not blanks.has(tensor):
        return None
    from whynan.capsule.sites import resolve

    made = resolve(blanks.made_at(tensor), "made here, without a value")
    bad = int((~tensor.detach().isfinite()).sum())
    evidence = [f"`{name}` was made by torch.empty and not, or not wholly, written", f"{bad} of {tensor.numel()} values are not finite"]
    return Finding(
        f"`{name}` holds uninitialised memory",
        evidence,
        spans=[made] if made.known else [],
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
    zeroing gradients cannot help: the model is dead until the weight is replaced. A bad row of an
    embedding can lie still for long: only the steps that look it up are lost.

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
    from whynan.capsule.sites import resolve

    bad = int((~tensor.detach().isfinite()).sum())
    evidence = [f"{bad} of {tensor.numel()} values of `{name}` are not finite"]
    if scene.symptom.detail:
        evidence.append(f"{scene.symptom.detail} are affected")
    evidence += _dead_since(scene)
    evidence.append(_who_reads(scene, tensor))
    loaded = resolve(scene.program.recorder.beside.loads.site_of(tensor), "load_state_dict brought it in here")
    return Finding(
        f"`{name}` is already damaged: {bad} of {tensor.numel()} values",
        evidence,
        spans=[loaded] if loaded.known else [],
        remedies=_try_values(scene, tensor, "go back to the last checkpoint whose weights are finite"),
        proven=True,
    )


def _who_reads(scene: Scene, tensor: Any) -> str:
    """Say which steps read a bad weight: of a table that rows are looked up in, those that meet a bad row."""
    from whynan.trace.lookups import only_looked_up

    birth = scene.birth
    if birth is None or birth.leaf is None or not only_looked_up(birth.graph, birth.leaf):
        return "skipping steps cannot help: every step reads this weight"
    places = rows(~tensor.detach().isfinite())
    return f"not finite: {places}" + ("" if places == "every row" else "; steps that look up other rows do not meet it")


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
        meant = scene.program.recorder.beside.infinities
        for root in scene.program.roots:
            for name, parameter in root.named_parameters():
                if not bool(parameter.detach().isfinite().all()) and not meant.are_known(parameter):
                    return parameter, name
    return None, ""


@rule("WN602", "buffer-not-finite", "buffer that was not finite before the step", rank=22)
def buffer_not_finite(scene: Scene) -> Finding | None:
    """A buffer, such as running statistics, was NaN, infinite or impossible before the step.

    What happened
    A forward pass writes running statistics, also when its step is skipped later. One bad
    batch, or one overflow under autocast, poisons them for good while all weights stay finite.
    A negative running variance counts as well, and so does the class weight of a loss, 1 / count
    for a class that was not counted.

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
        if is_weight(birth) and (used := used_at(birth)) is not None and is_loss(used[0]):
            return _weight_of_a_loss(scene, birth.leaf, used[0].sources[used[1]].name)
        tensor, name = birth.leaf.tensor, birth.leaf.name
        bad = int((~tensor.detach().isfinite()).sum())
        return Finding(
            f"buffer `{name}` is already damaged: {bad} of {tensor.numel()} values",
            [f"{bad} of {tensor.numel()} values of `{name}` are not finite", "skipping steps cannot help: every step reads this buffer"],
            remedies=_try_values(scene, tensor, "reset or re-estimate the buffer, or go back to a checkpoint where it is finite", 1.0),
            proven=True,
        )
    view = birth.view
    if (weight := bad_weight(view)) is not None and weight[0].role in ("buffer", "constant"):
        return _weight_of_a_loss(scene, *weight)
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


def _weight_of_a_loss(scene: Scene, leaf: Leaf, argument: str) -> Finding:
    """Say that the weight a module of a loss was made with is not finite."""
    tensor, name = leaf.tensor, leaf.name or argument
    bad = ~tensor.detach().isfinite()
    place = as_entries(rows(bad))
    count = f"{int(bad.sum())} of {tensor.numel()} values" + (f" ({place})" if place else "")
    title = f"make `{name}` finite where the loss is made: {UNCOUNTED}"
    return Finding(
        f"`{name}` of the loss is not finite: {count}",
        [f"not finite: {count} of `{name}`", "the loss was made with it: every batch that meets it is lost"],
        remedies=_try_values(scene, tensor, title, 1.0),
        proven=True,
    )


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
