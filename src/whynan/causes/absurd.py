"""Family 2, the finite part: nothing is NaN, and a number is a thousand times what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whynan.causes.catalogue import Finding, Scene, rule
from whynan.causes.facts import VIEWS, as_view, rows
from whynan.causes.fixes import Fix
from whynan.causes.usual import kept_above, values_of
from whynan.records import number

if TYPE_CHECKING:
    from whynan.trace.birth import Birth, View

_BELOW = {"div": 1, "reciprocal": 0, "rsqrt": 0, "log": 0, "sqrt": 0, "pow": 0}  # operations with a steep place near 0, and the operand that is near it
SKIP = Fix("leave such steps out: whynan run --spike skip")


@rule("WN205", "absurd-value", "finite value far outside what it was", rank=97)
def absurd_value(scene: Scene) -> Finding | None:
    """The step is finite, and its loss or gradient norm is a thousand times what it was.

    What happened
    A loss or gradient norm came out at least a thousand times as large as in the steps before,
    and one operation is to blame: its arguments are of the usual size, its result is not. Often a
    denominator of rounding noise, a root or logarithm very near 0, or a sample that holds an
    outlier.

    Why the result is non-finite
    It is not, and no test for NaN sees it. Adam keeps its square in the second moment for about a
    thousand steps; a plain gradient step throws the weights away.

    Example
        >>> guess, spread = torch.tensor(1.0, requires_grad=True), torch.tensor(1e-14)
        >>> loss = guess.square() / spread
        >>> loss.backward()
        >>> f"{loss.item():.0e}", f"{guess.grad.item():.0e}"
        ('1e+14', '2e+14')

    Instead
    Keep the operand away from where it blows up, by its usual size and not by a tiny eps.
        >>> guess.grad = None
        >>> loss = guess.square() / spread.clamp_min(0.01)
        >>> loss.backward()
        >>> f"{loss.item():.0f}", f"{guess.grad.item():.0f}"
        ('100', '200')

    `whynan run --spike skip` leaves such steps out.

    How sure
    The step and the last healthy steps are replayed with the same weights, and the size of every
    result is compared. Proven when the spike is gone with the usual size put in at that place, or
    with the change that is shown; otherwise nothing is said.

    Not this when
    Values grow little by little over many operations or many steps (WN605): no single place is to
    blame then, and none is named. A spread of equal rows as a denominator is WN404.
    """
    jump, birth = scene.jump, scene.birth
    if jump is None or birth is None:
        return None
    if birth.leaf is not None:
        return _outlier(scene, birth.leaf.tensor)
    view = _computed(birth)
    name = view.name if view is not None else ""
    if view is not None and name in VIEWS and (batch := view.output()) is not None and view.op.node < 0:
        return _outlier(scene, batch)
    below = view.input(_BELOW[name]) if view is not None and name in _BELOW else None
    near = f" of {number(float(below.abs().min()))}" if below is not None and below.numel() else ""
    what = f"{name.removeprefix('linalg_').removesuffix('_ex')}{near}"
    if birth.derivative:
        what = f"the slope of {what}" if name and name not in VIEWS else "the gradient that is handed back here"
    finding = finding_of(scene, f"{what} is {number(jump.size)}; {number(jump.usual)} is usual")
    if view is not None and below is not None:
        finding.fixes = [*_away(scene, view, name), SKIP]
    return finding


def _computed(birth: Birth) -> View | None:
    """Return the operation of a birth; for the copy of its result that autograd keeps of a root, the root: a copy has no slope."""
    view = birth.forward
    made = as_view(view.maker(0)) if view is not None and birth.derivative and view.name == "detach" else None
    if view is None or made is None:
        return view
    return made if made.op.index == view.op.index - 1 and made.site == view.site else view  # it comes right after, from the same call


def finding_of(scene: Scene, label: str) -> Finding:
    """Return what is true of every jump."""
    jump = scene.jump
    assert jump is not None
    evidence = [f"{jump.name} {number(jump.value)}; it was about {number(jump.level)} before", "everything is finite: a test for nan or inf does not see this"]
    if jump.explains:
        scene.tried("the step with results of the usual size at this place", jump.after)
        evidence.append(f"replayed with results of the usual size here: {jump.after}")
    output = scene.birth.forward.output() if scene.birth is not None and scene.birth.forward is not None else None
    finding = Finding(label, evidence, [SKIP], proven=jump.explains)
    if output is not None and jump.usual and output.dim() and len(output) > 1:
        finding.rows = _rows(output, jump.usual)
        finding.among = len(output)
    return finding


def _rows(values: Any, usual_size: float) -> list[int]:
    far = values.detach().abs() > 30 * usual_size
    hit = far.flatten(1).any(1) if far.dim() > 1 else far
    found = [int(i) for i in hit.nonzero()[:, 0]]
    return found if len(found) < len(hit) else []


def _away(scene: Scene, view: View, name: str) -> list[Fix]:
    """Keep an operand away from 0, just below the smallest that it was in healthy steps."""
    return kept_above(values_of(scene, name, _BELOW[name], view.site), _BELOW[name])


def _outlier(scene: Scene, tensor: Any) -> Finding:
    jump = scene.jump
    assert jump is not None
    finding = finding_of(scene, f"the batch holds {number(jump.size)}; up to {number(jump.usual)} is usual")
    far = tensor.detach().abs() > 30 * jump.usual
    finding.rows, finding.among = _rows(tensor, jump.usual) if tensor.dim() else [], len(tensor) if tensor.dim() else 0
    finding.evidence.append(f"{int(far.sum())} of {tensor.numel()} values far outside{': ' + rows(far) if rows(far) else ''}")
    finding.fixes = [Fix("leave these samples out, or clip them where they are loaded", leave_out=True), SKIP]
    return finding
