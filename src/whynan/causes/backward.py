"""Family 5: the forward pass and the loss are finite, the gradient is not. What its rules all ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whynan.causes.catalogue import Scene
from whynan.records import Phase

if TYPE_CHECKING:
    from whynan.trace.birth import Birth, View

EDGES = {  # where a function is finite and its slope is not
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


def parts(scene: Scene) -> tuple[Birth, View] | None:
    """Return the birth and the forward operation to which it belongs, where the gradient alone is bad."""
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


def loss_of(scene: Scene, birth: Birth) -> float | None:
    """Return the loss of a birth's step as the program has it, without the scale of a gradient scaler."""
    return birth.losses[-1] / (scene.lab.scale if scene.lab is not None else 1.0) if birth.losses else None


def ops_of_node(birth: Birth) -> list[Any]:
    """Return the backward operations of the node that the birth is one of."""
    assert birth.op is not None
    return [op for op in birth.graph.ops if op.backward and op.node == birth.op.node and op.entry == birth.op.entry]


def before_clipping(scene: Scene) -> list[str]:
    """Say what clipping would have made of an infinite gradient, and whose it was: after it nobody can tell."""
    if scene.symptom.kind != "inf" or scene.symptom.place != "gradient" or all(e.kind != "clip" for e in scene.program.entries):
        return []
    whose = f"the gradient of `{scene.symptom.name}` was infinite before clipping" + (f" ({scene.symptom.detail})" if scene.symptom.detail else "")
    return [whose, "clipping by a norm of inf multiplies it by 0: that is nan, and the update writes it into the weight"]
