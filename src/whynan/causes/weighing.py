"""A tensor from outside at the operation that first computes with it: what it is called there, and whether it only weighs something. No torch import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.causes.facts import VIEWS

if TYPE_CHECKING:
    from whynan.causes.source import Expression
    from whynan.trace.birth import Birth, View
    from whynan.trace.graph import Graph, Leaf, Op

LOSSES = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "nll_loss", "kl_div", "cross_entropy", "soft_margin_loss")
WEIGHTS = ("weight", "pos_weight")  # what torch's losses call the arguments that weigh classes or elements
UNCOUNTED = "a weight of 1 / count is infinite for what was not counted"
_LONGEST = 60  # of a text that is put into a sentence


def used_at(birth: Birth) -> tuple[Op, int] | None:
    """Return the operation that first computes with a bad leaf, not counting the cutting out of a batch, and which argument it is there."""
    from whynan.trace.birth import View as Made

    assert birth.leaf is not None
    graph, index = birth.graph, birth.leaf.first_use
    made = next((s.maker for s in graph.ops[index].sources if _handed(graph, s.maker) is birth.leaf), None) if 0 <= index < len(graph.ops) else None
    for op in graph.ops[index:] if made is not None else ():
        place = next((i for i, s in enumerate(op.sources) if s.maker == made), None)
        if place is None:
            continue
        if Made(op, birth).name not in (*VIEWS, "index", "index_select"):
            return _as_weight(birth, op) or (op, place)
        made = op.index
    return None


def _as_weight(birth: Birth, op: Op) -> tuple[Op, int] | None:
    """Return the operation of the same loss that takes a leaf by the name of a weight: with label smoothing it is multiplied by hand besides."""
    inside = [other for other in birth.graph.ops if is_loss(op) and other.site == op.site and is_loss(other) and not other.backward]
    named = ((other, i, s.maker) for other in inside for i, s in enumerate(other.sources) if s.name in WEIGHTS)
    return next(((other, i) for other, i, maker in named if _handed(birth.graph, maker) is birth.leaf), None)


def _handed(graph: Graph, maker: int) -> Leaf | None:
    """Return the leaf that a value is, or was cut out of."""
    from whynan.trace.slicing import HAND_ON, base

    for _ in range(20):
        if maker < 0:
            return graph.leaves[-1 - maker]
        op = graph.ops[maker]
        if base(op) not in HAND_ON or not op.sources:
            return None
        maker = op.sources[0].maker
    return None


def is_loss(op: Op) -> bool:
    """Whether an operation is one of torch's losses, or runs in one."""
    return any(name in op.call or name in op.name for name in LOSSES)


def bad_weight(view: View | None) -> tuple[Leaf, str] | None:
    """Return what one of torch's losses was made or called with and whose infinity makes its value bad, and its name there: inside a loss none is a mask."""
    if view is None or view.op.backward or not is_loss(view.op):
        return None
    graph = view.birth.graph
    inside = [op for op in graph.ops[: view.op.index + 1] if op.site == view.op.site and is_loss(op)]
    for source in (s for op in inside for s in op.sources if s.damage.posinf):
        leaf = _handed(graph, source.maker)
        if leaf is not None and any(leaf is writer for writer in view.birth.slice.written_by):
            return leaf, source.name if source.name in WEIGHTS else "weight"
    return None


def is_weight(birth: Birth) -> bool:
    """Whether a bad leaf weighs something: torch's own losses name it so, and a factor of what was compared with a target already is no target."""
    found = used_at(birth)
    if found is None:
        return False
    op, place = found
    if is_loss(op):
        return op.sources[place].name in WEIGHTS
    return op.name.startswith("aten.mul") and any(_compared(birth.graph, s.maker) for i, s in enumerate(op.sources) if i != place)


def _compared(graph: Graph, maker: int) -> bool:
    """Whether a value was made of a result of the model and of something from outside that did not go through the model."""
    model = outside = False
    todo, seen = [maker], set[int]()
    while todo and len(seen) < 200:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current < 0:
            outside |= graph.leaves[-1 - current].role == "input"
        elif graph.ops[current].in_module:
            model = True
        else:
            todo += [s.maker for s in graph.ops[current].sources]
    return model and outside


def source_text(birth: Birth, expression: Expression | None) -> str:
    """Return what the source calls a leaf where it is first computed with: a target, where it is handed to the loss."""
    from whynan.causes.naming import named_by_source
    from whynan.trace.birth import View as Made

    found = used_at(birth)
    if found is None:
        return ""
    op, place = found
    if expression is not None and expression.calls_object() and expression.construction() is not None:
        texts = expression.as_plain_call().operands  # torch's own modules hand their arguments on in this order
        text = " ".join(texts[place].split()) if place < len(texts) == len(op.sources) else ""
    else:
        text = named_by_source(Made(op, birth), expression).get(op.sources[place].name, "")
    return text if len(text) < _LONGEST else ""


def weight_name(birth: Birth, expression: Expression | None) -> str:
    """Call a weight what the source calls it where it is handed to the loss or multiplied."""
    from whynan.causes.naming import named_by_source
    from whynan.trace.birth import View as Made

    found = used_at(birth)
    if found is None:
        return "weight"
    op, place = found
    name = op.sources[place].name
    text = named_by_source(Made(op, birth), expression).get(name, "") if not is_loss(op) else ""
    if is_loss(op) and expression is not None:
        third = expression.operands[2] if name == "weight" and len(expression.operands) > 2 else ""  # input, target, weight
        text = " ".join(expression.keywords.get(name, third).split())
    return text if 0 < len(text) < _LONGEST else name if name in WEIGHTS else "weight"
