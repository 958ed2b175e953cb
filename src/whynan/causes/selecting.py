"""Masks told from numbers that happen to be 0: by their type, by what made them, by what they are in healthy steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from whynan.causes.facts import VIEWS, as_view, consumers, fixed, is_same, lineage, readers, skip_views, zeros_and_ones
from whynan.causes.usual import before

if TYPE_CHECKING:
    from whynan.causes.catalogue import Scene
    from whynan.trace.birth import View
    from whynan.trace.graph import Leaf

_TURNED = VIEWS | {"sub", "rsub", "mul", "where", "masked_fill", "minimum", "maximum", "clamp", "ones_like", "zeros_like"}


def selects(scene: Scene, step: View, index: int, values: Any, quotient: View | None = None) -> bool:
    """Whether an argument of an operation is a mask or a count, not weights or activations that are 0 here.

    Cost: a forward pass of each healthy step that was kept, for a float tensor that is 0 everywhere and comes from no comparison.
    """
    if not values.is_floating_point():
        return True
    if not zeros_and_ones(values) or not fixed(step, index):
        return False
    if bool(values.any()) or _was_decided(step, index):
        return True
    seen = before(scene, step.name, index, step.site) if step.site is not None else []
    if seen:
        return all(value == 1 for value in seen)
    return quotient is not None and weighs(quotient, step)


def _was_decided(step: View, index: int) -> bool:
    """Whether an argument was made from something that is true or false, or from whole numbers."""
    return any(not _is_float(made.maker(i)) for made in lineage(step, _TURNED, start=index) if made.name in _TURNED for i in range(len(made.op.sources)))


def _is_float(made: View | Leaf | None) -> bool:
    view = as_view(made)
    dtype = view.op.dtype if view is not None else str(getattr(getattr(made, "tensor", None), "dtype", "float"))
    return not dtype or "float" in dtype or "complex" in dtype


def weighs(quotient: View, step: View) -> bool:
    """Whether the numerator adds up products with the very tensor that the divisor adds up: a weighted mean."""
    products = (m for m in lineage(quotient, VIEWS | {"sum", "mul"}, depth=6, start=0) if m.name == "mul" and len(m.op.sources) == 2)
    return any(is_same(m.maker(i), step.maker(0)) for m in products for i in range(2))


_PRODUCTS = frozenset({"mul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "matmul", "einsum", "_sparse_mm"})


def weighs_on(scene: Scene, shares: View) -> bool:
    """Whether shares of a whole are what something else is weighed with: multiplied by it, not by the weights of a layer. Unless nothing takes them."""
    outside, birth = scene.met, scene.birth
    if birth is None or (outside is not None and outside.leaf is None):
        return True
    takers = list(consumers(birth, shares) if outside is None or outside.leaf is None else readers(outside, outside.leaf))
    computing = [taker for taker in takers if taker.name not in VIEWS]
    return not computing or any(taker.name in _PRODUCTS and not _by_weights(taker) for taker in computing)


def _by_weights(product: View) -> bool:
    return any(getattr(skip_views(product.maker(i)), "role", "") == "parameter" for i in range(len(product.op.sources)))
