"""Family 6, the silent part: nothing is non-finite, and nothing is learned any more."""

from __future__ import annotations

from typing import Any

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.fixes import Fix
from whynan.records import Phase, Remedy, number


@rule("WN609", "training-stands-still", "training that stands still", rank=1)
def training_stands_still(scene: Scene) -> Finding | None:
    """Every number is finite, and nothing is learned any more.

    What happened
    For 20 steps in a row no gradient arrived at any weight, or the learning rate was 0 for 32,
    or the program itself left out 20 steps in a row, or updates of half-precision weights
    rounded away, or a running value (a moving average, a cluster prior) has become NaN and is
    read by every step.

    Why the result is non-finite
    It is not: that is why nobody notices. A clamp, `nan_to_num`, a `where` or a guard such as
    `if not isfinite(loss): loss = loss * 0` turns a NaN into a harmless number without slope.
    The loss then shows one constant value, often 0.0, for the rest of the run.

    Example
        >>> w = torch.ones(3, requires_grad=True)
        >>> prior = torch.tensor([0.5, float("nan"), 0.5])  # one bad row, long ago
        >>> loss = torch.nan_to_num((w * prior).sum())
        >>> loss.backward()
        >>> loss.item(), w.grad
        (0.0, tensor([0., nan, 0.]))
        >>> w.grad = None
        >>> loss = ((w * prior).sum()).clamp(0, 100) if (w * prior).sum().isfinite() else w.sum() * 0
        >>> loss.backward()
        >>> loss.item(), w.grad
        (0.0, tensor([0., 0., 0.]))

    Instead
    Keep a bad value out of what outlives the step, and let a bad batch be skipped as a whole.
        >>> prior = torch.tensor([0.5, 0.5, 0.5])
        >>> new = torch.tensor([0.4, float("nan"), 0.6])
        >>> prior = torch.where(new.isfinite(), 0.9 * prior + 0.1 * new, prior)
        >>> w.grad = None
        >>> (w * prior).sum().backward()
        >>> w.grad
        tensor([0.4900, 0.5000, 0.5100])

    How sure
    The gradients, the learning rate and the running values were read; where the gradient ends is
    found by a replay: the operation that gets a gradient and hands on zeros.

    Not this when
    The loss is exactly 0 and nothing carried is NaN: a hinge loss that is satisfied. Nor an
    optimizer that rests while another one learns, nor a rate of 0 that its schedule will raise
    again. These are written to `warnings.jsonl` and not called an incident. A table in which NaN
    marks what is not known yet (written anew, read by `nanmean`) is no running value.
    """
    still = scene.still
    if still is None:
        return None
    return {"rate": _resting, "skipped": _skipped, "rounding": _rounding, "average": _average}.get(still.kind, _no_gradient)(scene, still)


def _resting(scene: Scene, still: Any) -> Finding:
    advice = "call scheduler.step()" if still.detail else "end the training here, or give the schedule more steps"
    return Finding(
        f"the learning rate is 0 since step {still.since}",
        [f"the learning rate is 0 since step {still.since}: no update changes a weight", *filter(None, [still.detail])],
        [Fix(advice)],
        site=scene.made_at,
        phase=Phase.OPTIMIZER,
        proven=True,
    )


def _skipped(scene: Scene, still: Any) -> Finding:
    return Finding(
        "the program leaves out every step",
        [f"since step {still.since} every loss was bad and the program went on to the next batch: no weight has changed since"],
        [Fix("see the incident before this one for the reason; go back to the last good checkpoint")],
        proven=True,
    )


def _rounding(scene: Scene, still: Any) -> Finding:
    return Finding(
        "updates round away",
        [f"since step {still.since} gradients arrive and no weight moves", still.detail, "an update below half a unit in the last place of a weight is lost"],
        [Fix("keep float32 weights (autocast instead of .half() or .bfloat16()), or raise the learning rate")],
        site=scene.made_at,
        phase=Phase.OPTIMIZER,
        proven=True,
    )


def _average(scene: Scene, still: Any) -> Finding:
    title = "give it a finite value again, and keep bad values out: torch.where(new.isfinite(), average, old)"
    return Finding(
        "a running value is nan",
        [still.detail, "once nan, an average stays nan: nan times anything plus anything is nan"],
        remedies=[_with_finite_values(scene, title)],
        site=still.site,
        phase=Phase.LOSS if still.site is not None else None,
        proven=True,
    )


def _no_gradient(scene: Scene, still: Any) -> Finding:
    steps = scene.step - still.since + 1
    loss = f"; the loss stays at {number(still.loss)}" if still.same and still.loss is not None else ""
    weight = "weight of this optimizer" if still.apart else "weight"
    evidence = [f"no gradient has arrived at any {weight} for {steps} steps, since step {still.since}{loss}"]
    if still.apart:
        evidence.append("another optimizer learns on")
    if still.detail:
        evidence.append(still.detail)
    weights = [p for group in scene.optimizer.param_groups for p in group["params"]]
    if all(p.grad is None for p in weights):
        return _absent(scene, weights, evidence)
    from whynan.trace.dying import Endings, endings

    try:
        found = Endings([], True) if still.elsewhere else endings(scene.program)
    except Exception:  # MemoryError too: the finding stands without the place
        found = Endings([], True)
    if not found.reaches:
        evidence.append("the loss does not depend on any weight: its graph was cut (detach, item, no_grad, a new tensor)")
        return Finding(
            "the loss has no path to the weights",
            evidence,
            [Fix("keep the loss a result of the model's output")],
            site=still.site,
            phase=Phase.LOSS if still.site is not None else None,
            proven=True,
        )
    end = found.ends[0] if found.ends else None
    name = end.node.removesuffix("0").removesuffix("1").removesuffix("Backward") if end is not None else ""
    label = f"the gradient ends here: {name} gets one and hands on zeros" if end is not None else "no gradient arrives"
    fix = (
        "give the running value a finite value again, and keep bad values out of it"
        if still.detail
        else "let the gradient pass: no clamp, rounding or factor 0 on the way"
    )
    remedies = [_with_finite_values(scene, fix) if still.detail or end is None else _without_it(scene, end, fix)]
    return Finding(
        label,
        evidence,
        remedies=remedies,
        site=end.site if end is not None else still.site,
        phase=Phase.LOSS if end is not None and end.outside else None,
        proven=True,
    )


def _with_finite_values(scene: Scene, title: str) -> Remedy:
    """Replay the step with a finite number in place of each NaN that it carries."""
    from whynan.capsule.tape.entries import Outside

    assert scene.lab is not None
    read = {id(leaf): leaf for e in scene.program.entries for leaf in e.reads if isinstance(leaf, Outside)}
    bad = [(leaf, leaf.saved) for leaf in read.values() if leaf.value().is_floating_point() and bool(leaf.value().isnan().any())]
    if not bad:
        return Remedy(title)
    try:
        for leaf, _ in bad:
            value = leaf.value()
            finite = value[value.isfinite()]
            leaf.saved = value.nan_to_num(nan=float(finite.mean()) if finite.numel() else 1 / value.numel())
        outcome = scene.lab.run()
    finally:
        for leaf, saved in bad:
            leaf.saved = saved
    good, words = scene.lab.judge(outcome)
    scene.tried(title, words)
    return Remedy(title, "", False, "proven" if good and outcome.norm else "not tried", f"with finite numbers there: {words}; gradient alive" if good else "")


def _without_it(scene: Scene, end: Any, title: str) -> Remedy:
    """Replay the step without the operation in which the gradient ends, where it maps its argument element by element."""
    from whynan.causes.swapping import Put

    assert scene.lab is not None

    def skip(func: Any, args: Any, kwargs: Any) -> Any:
        name = getattr(func, "__name__", "").strip("_")
        fits = name in ("clamp", "clip", "clamp_min", "clamp_max", "round", "floor", "ceil", "sign", "relu", "hardtanh", "sigmoid", "tanh", "threshold")
        return args[0] if fits and args else NotImplemented

    outcome = scene.lab.run(Put(skip, frozenset([end.site])))
    if not scene.lab.hit or not outcome.finite or not outcome.norm:
        return Remedy(title)
    scene.tried("the step without this operation", outcome.effect())
    return Remedy(title, "", False, "proven", f"without this operation: {outcome.effect()}; gradient alive")


def _absent(scene: Scene, weights: list[Any], evidence: list[str]) -> Finding:
    own = {id(p) for p in weights}
    others = sum(p.grad is not None and id(p) not in own for root in scene.program.roots for p in root.parameters())
    evidence.append(f"none of the {len(weights)} tensors of the optimizer has a gradient")
    if others:
        evidence.append(f"{others} other tensors have one: the optimizer was made for another copy of the model")
    advice = (
        "make the optimizer from the parameters that are trained, after the model is in its final form"
        if others
        else "check that the loss depends on these parameters"
    )
    return Finding("the optimizer's tensors get no gradient", evidence, [Fix(advice)], site=scene.made_at, phase=Phase.OPTIMIZER, proven=True)
