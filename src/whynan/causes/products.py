"""A product with a mask on the line that makes an infinity: whether the mask is to blame, or what made the infinity. No torch import."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from whynan.causes.catalogue import Finding, Scene
from whynan.causes.facts import counted, skip_views
from whynan.causes.fixes import guarded, plain_name
from whynan.causes.logarithms import log_fixes

if TYPE_CHECKING:
    from whynan.trace.birth import View


def next_on_line(scene: Scene, name: str) -> View | None:
    """Return the first operation of that name on the way to the symptom, if it stands on the lines of the birth."""
    from whynan.capsule.sites import positions

    birth = scene.birth
    assert birth is not None
    path = birth.path()
    here = path[0].site if path else None
    for view in path[1:6]:
        if view.name == name and here is not None and view.site is not None:
            (first, last, *_), (start, end, *_) = positions(view.site), positions(here)
            return view if view.site.code is here.code and first <= end and start <= last else None
    return None


def masked_on_the_same_line(scene: Scene) -> Finding | None:
    """A product target * log(p) in one expression, with a target of 0 wherever p is 0."""
    product = next_on_line(scene, "mul")
    birth = scene.birth
    view = birth.view if birth is not None else None
    if product is None or view is None or not product.op.damage.nan or product.op.damage.posinf or product.op.damage.neginf:
        return None
    factors = [(i, t) for i, t in enumerate((product.input(0), product.input(1))) if t is not None and not bool(t.isinf().any())]
    if len(factors) != 1 or not bool((factors[0][1] == 0).any()) or _computed_zero(view, product, factors[0][0]):
        return None
    if not _heals(scene, product):
        return None
    count = int((factors[0][1] == 0).sum())
    fixes = log_fixes(view) if view.name != "exp" else guarded(view.name, view.op.dtype)
    return Finding(
        f"0 * inf is nan: {view.name} is infinite where the factor is 0",
        [counted(count, "factors are 0"), "multiplying by 0 does not remove an infinity"],
        fixes,
    )


def _computed_zero(view: View, product: View, place: int) -> bool:
    """Whether the factor of 0 has a gradient or is what the logarithm is of: p * log(p) is the logarithm's own fault."""
    made = skip_views(product.maker(place))
    inside = skip_views(view.maker(0))
    both = getattr(made, "op", None), getattr(inside, "op", None)
    leaf = getattr(made, "tensor", None)
    if leaf is not None and leaf.requires_grad:
        return True
    return (None not in both and both[0] is both[1]) or (both[0] is not None and both[0].node >= 0)


def _heals(scene: Scene, product: View) -> bool:
    """Whether the loss is finite with nothing more than the infinities left out where their factor is 0; an infinity that counts too is its maker's fault.

    Cost: one replay; one more where that does not heal the step.
    """
    left, right = product.input(0), product.input(1)
    if left is not None and right is not None and bool((left * right).isinf().any()):
        return False
    if scene.lab is None or scene.birth is None or scene.symptom.place != "loss":
        return True
    from whynan.causes.swapping import Put
    from whynan.trace.mending import places_of, without

    gave = scene.lab.run(Put(_selected, None, "mul"))
    if gave.error or gave.loss is None:
        return True  # it cannot be asked
    scene.tried("the step with infinities left out of products where the factor is 0", gave.effect() if math.isfinite(gave.loss) else "still not finite")
    return math.isfinite(gave.loss) or not without(scene.program, scene.targets, places_of(scene.birth)).finite  # the last: another place is bad, too


def _selected(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Multiply with 0 in place of an infinity where the other factor is 0."""
    import torch

    if plain_name(func) != "mul" or func.__name__ == "__imul__" or len(args) != 2 or kwargs:
        return NotImplemented
    tensors = [a if isinstance(a, torch.Tensor) else torch.as_tensor(a) for a in args]
    one, other = torch.broadcast_tensors(*tensors)
    meets = (one.isinf() & (other == 0)) | (other.isinf() & (one == 0))
    return torch.where(meets, torch.zeros_like(result := func(*args)), result) if bool(meets.any()) else NotImplemented
