"""Family 6: optimizer state that was bad before the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.fixes import Fix
from whynan.records import Remedy


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
        f"{name} is not finite; {_what_it_does(scene)}",
        [*evidence, "weights and gradients are finite"],
        remedies=_try_cleared(scene),
        proven=True,
        site=scene.site,
    )


def _written_by_state(scene: Scene) -> Finding | None:
    """A weight that went bad while whynan watched, every gradient finite: its moments are bad in the same places."""
    birth = scene.birth
    leaf = birth.leaf if birth is not None else None
    before = [h for h in scene.history if h["step"] < scene.step]  # a step that is read late is in the history itself
    watched = before and scene.symptom.place in ("loss", "gradient", "buffer")  # a weight that was bad from the start is a symptom of its own
    if leaf is None or leaf.role != "parameter" or not watched:
        return None
    if any(not math.isfinite(h.get(key, 0.0)) for h in before for key in ("loss", "grad_norm")):
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


def _try_cleared(scene: Scene) -> list[Remedy]:
    """Make the update once with an empty state."""
    title = "clear the optimizer's state (optimizer.state.clear()) or load it from an earlier checkpoint"
    if scene.optimizer is None:
        return [Remedy(title)]
    try:
        finite = _updated(scene, lambda: _weights_finite(scene), empty=True)
    except TypeError:
        return [Remedy(title)]  # it wants a closure
    except Exception:  # it makes its state when it is made itself, as the Adagrad of torch 2.11
        return [Remedy("make the optimizer anew or load its state from an earlier checkpoint")]
    scene.tried("the same update with an empty optimizer state", "finite" if finite else "still not finite")
    return [
        Remedy(title, result="proven" if finite else "failed", effect="with an empty optimizer state: the update is finite" if finite else "still not finite")
    ]


def _what_it_does(scene: Scene) -> str:
    """Say what the update makes of a state that is not finite: an infinite second moment is divided by, and what it belongs to stands still."""
    return "the update divides by it, and these weights do not move" if stands_still(scene) else "the update would write it into the weights"


def stands_still(scene: Scene) -> bool:
    """Whether the next updates leave the weights whose state is not finite where they are, by making two."""
    from whynan.capsule.stepped import unwatched_step

    def held() -> list[tuple[Any, Any]]:
        kept = [(p, v) for p in weights for v in scene.optimizer.state.get(p, {}).values() if getattr(v, "shape", None) == p.shape]
        return [(p, hit) for p, value in kept if (hit := ~value.isfinite()).any()]

    def asked() -> bool:
        before = [(p, hit, p.detach()[hit]) for p, hit in held()]
        scene.program.recorder.suspended(unwatched_step(scene.optimizer), scene.optimizer)
        return bool(before) and _weights_finite(scene) and all(bool((p.detach()[hit] == now).all()) for p, hit, now in before)

    weights = [p for g in scene.optimizer.param_groups for p in g["params"] if p.grad is not None] if scene.optimizer is not None else []
    try:
        return bool(weights) and _updated(scene, asked)
    except Exception:  # it wants a closure
        return False


def _weights_finite(scene: Scene) -> bool:
    return all(bool(p.detach().isfinite().all()) for g in scene.optimizer.param_groups for p in g["params"])


def _updated(scene: Scene, asked: Callable[[], bool], empty: bool = False) -> bool:
    """Make the update, with an empty state or as it is, ask, and put everything back. Raises what the optimizer raises."""
    from whynan.capsule.snapshot import Snapshot
    from whynan.capsule.stepped import unwatched_step

    step = unwatched_step(scene.optimizer)
    with Snapshot(scene.optimizer):
        if empty:
            scene.optimizer.state.clear()
        scene.program.recorder.suspended(step, scene.optimizer)
        return asked()
