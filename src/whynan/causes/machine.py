"""Family 8: the machine, the compiler."""

from __future__ import annotations

import math

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.fixes import Fix
from whynan.records import number


@rule("WN803", "compiled-only", "only the compiled step is not finite", rank=14)
def compiled_only(scene: Scene) -> Finding | None:
    """The compiled step was not finite, the same step run eagerly was.

    What happened
    The step runs under torch.compile. Replayed with the eager originals of its compiled parts,
    from the same state, it is finite.

    Why the result is non-finite
    A compiler fuses operations, keeps intermediate values in another precision and may order
    arithmetic in another way. What is the same on paper is not the same near the edge of a
    range; a fault of the compiler is possible as well.

    Example
        >>> x = torch.tensor(1e20)
        >>> x * x / x, x * (x / x)
        (tensor(inf), tensor(1.0000e+20))

    Instead
    Run this part eagerly and keep the rest compiled; report the case to PyTorch.
        >>> @torch.compiler.disable
        ... def energy(x):
        ...     return (x * 1e-20).square().sum()
        >>> x = torch.tensor([1e20, 2e20], requires_grad=True)
        >>> value = energy(x)
        >>> value.backward()
        >>> round(value.item(), 3), (x.grad > 0).all().item()
        (5.0, True)

    To narrow it down, compile with backend="eager" (capture only), then backend="aot_eager"
    (capture and autograd), then the default.

    How sure
    The finding is proven by the eager replay: same weights, batch and random state, finite
    result. Which operation of the compiled code differs is not known, nor whether a second
    compiled run would fail again.

    Not this when
    The eager replay is bad too (the code of that birth), nothing in the step is compiled
    (WN802), or the replay was not exact (WN901).
    """
    if scene.birth is not None or not scene.compiled or scene.trouble:
        return None
    return Finding(
        "the same step run eagerly is finite",
        ["the step was replayed with the eager originals of its compiled parts and was finite"],
        [Fix("run this part without torch.compile, and report the case to PyTorch with the capsule")],
        proven=True,
    )


@rule("WN802", "not-reproducible", "the same step run again was finite", rank=15)
def not_reproducible(scene: Scene) -> Finding | None:
    """The same step, run again from the same state, was finite.

    What happened
    The run saw a bad loss, gradient or buffer. Replayed with the same weights, batch and random
    state the step was finite. Something that the replay does not hold differed: a value that the
    program's own code keeps outside torch (an iterator, a file, a library's own state), a
    nondeterministic kernel, a race, faulty memory.

    Why the result is non-finite
    Kernels with atomic adds sum in an order that changes from run to run. Near the edge of the
    range the order decides. A bit that flips in memory can make any number.

    Example
        >>> a = torch.tensor(3e38)
        >>> (a + a) - a, a + (a - a)
        (tensor(inf), tensor(3.0000e+38))

    Instead
    Ask for deterministic kernels, and bring the values away from the edge of the range.
        >>> torch.use_deterministic_algorithms(True)
        >>> x = torch.tensor([3e38, 3e38, -3e38], requires_grad=True)
        >>> value = (x * 1e-30).sum()
        >>> value.backward()
        >>> value.isfinite().item(), (x.grad > 0).all().item()
        (True, True)
        >>> torch.use_deterministic_algorithms(False)

    If it comes back on one machine or GPU only, test the hardware. Skipping the step is right
    here: there is nothing in the code that a change would repair.

    How sure
    whynan replays the step twice, and this code is given only if both are finite and the loss is
    that of the run, where it was finite, and the same in both. That the step does not reproduce is
    proven. Which of the reasons it was is not.

    Not this when
    The step is compiled (WN803), the replay was not exact or not possible (WN901), or the value
    came from another rank (WN801).
    """
    if scene.birth is not None or scene.trouble or scene.symptom.place not in ("loss", "gradient", "buffer") or scene.lab is None:
        return None
    once, again = scene.lab.run(), scene.lab.run()
    if again.error or not again.finite or not math.isfinite(again.norm or 0.0):
        return None
    scene.tried("the same step once more", again.effect())
    if _differ(scene.loss, again.loss):
        scene.trouble = f"the replay is not the step that ran: its loss is {number(again.loss or 0.0)}, that of the run was {number(scene.loss or 0.0)}"
        return None
    if _differ(once.loss, again.loss):
        losses = f"{number(once.loss or 0.0)} and {number(again.loss or 0.0)}"
        scene.trouble = f"two replays give different losses, {losses}: the step reads something that each of them moves on, such as an iterator"
        return None
    return Finding(
        "replayed twice from the same state, finite both times",
        ["two replays with the same weights, batch and random state were finite", f"the second gave {again.effect()}"],
        [Fix("look for what the step reads outside torch, a nondeterministic kernel (torch.use_deterministic_algorithms(True)), faulty hardware")],
        proven=True,
    )


def _differ(one: float | None, other: float | None) -> bool:
    """Whether two losses that are known and finite are not those of one step."""
    if one is None or other is None or not math.isfinite(one):
        return False
    return not math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6)


@rule("WN801", "another-rank", "value that came in from another rank", rank=91)
def another_rank(scene: Scene) -> Finding | None:
    """The bad value came in through a collective from another rank.

    What happened
    This rank's own loss and gradients were finite. all_reduce, the gradient average of a
    data-parallel wrapper, all_gather or a synchronised BatchNorm mixed in a value from a rank
    where the damage was born.

    Why the result is non-finite
    A sum over ranks keeps a NaN, so after one collective all ranks are bad and look alike. Only
    the rank that was bad before it has the cause.

    Example
        >>> ranks = torch.tensor([[0.5, 1.0], [0.25, float("nan")]])  # a gradient on two ranks
        >>> ranks.mean(0)  # what both receive
        tensor([0.3750,    nan])

    Instead
    Look before the collective, and let all ranks decide together whether to step.
        >>> finite = ranks.isfinite().all(1)  # one flag a rank
        >>> step = finite.all()  # all_reduce of the flag with MIN
        >>> step.item(), (~finite).nonzero().flatten().tolist()
        (False, [1])

    A rank that skips by itself leaves the others waiting in the next collective. Leaving the
    bad rank out of the average is finite, but changes the batch; skipping the step does not.

    How sure
    Proven when the value sent by the named rank was non-finite and this rank's own was finite
    before the same collective. Otherwise the rank is suspected. The line and the cause are in
    the report of the rank that is named.

    Not this when
    This rank's own value was bad before the collective (the code of its cause), or all were
    finite and their sum was not (WN202, WN203).
    """
    return None
