"""Whether a value that is not finite is damage or was meant: what an operation makes of the colours of its arguments."""

from __future__ import annotations

from typing import Any

import torch

from whynan.trace.graph import Colour, Graph, Leaf, Op, Source
from whynan.tripwire.values import damage_of

_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "empty_permuted")
FILLS = (
    "full",
    "full_like",
    "new_full",
    "fill",
    "fill_",
    "masked_fill",
    "masked_fill_",
    "scalar_tensor",
    "lift_fresh",
    "lift_fresh_copy",
    "constant_pad_nd",
    "index_fill",
    "index_fill_",
)

_FILL_CALLS = ("full", "fill", "where", "tensor", "pad", "scalar")  # fmt: skip
_LOGS = ("log", "log2", "log10", "log_", "log1p")


def colour_of(graph: Graph, op: Op, name: str, args: Any) -> Colour:
    """Return the colour of a result that is not finite."""
    worst = max((s.colour for s in op.sources), default=Colour.CLEAN)
    if name in _UNWRITTEN:
        return Colour.UNWRITTEN
    if worst is Colour.DAMAGE:
        return Colour.DAMAGE
    if worst is Colour.UNWRITTEN:
        return Colour.UNWRITTEN
    if worst is Colour.DELIBERATE:
        spread = not op.damage.nan or any(s.damage.nan for s in op.sources)
        return Colour.DELIBERATE if spread else Colour.DAMAGE
    if name == "scalar_tensor" and op.damage.nan and not any(word in op.call for word in _FILL_CALLS):
        return Colour.CLEAN  # torch's own way to say "not defined" (logdet); what selects it is the birth
    if (name in FILLS and not op.backward) or (_written_infinity(op) and not op.damage.nan):
        return Colour.DELIBERATE
    if name in _LOGS and not op.damage.nan and _of_a_mask(graph, op, args[0]):
        return Colour.DELIBERATE
    return Colour.DAMAGE


def _of_a_mask(graph: Graph, op: Op, argument: torch.Tensor) -> bool:
    """Whether the argument of a logarithm is a 0/1 mask: by its values and by where it came from."""
    if not op.sources or not bool(((argument == 0) | (argument == 1)).all()):
        return False
    made = graph.maker(op.sources[0])
    if isinstance(made, Leaf):
        return made.role in ("input", "buffer", "constant")
    return made.name.split(".")[1] in ("_to_copy", "tril", "triu", "ones", "zeros", "eq", "ne", "lt", "le", "gt", "ge")


def without_unchosen(sources: list[Source], args: Any) -> list[Source]:
    """Take those sides of a choice for clean whose bad values were not chosen: missing values that are filled in, from a mean that went bad itself."""
    chosen, kept = args[0], {"self": args[1], "other": args[2]}
    sides = {"self": chosen, "other": ~chosen}
    left = [s.name for s in sources if s.damage and not damage_of(torch.where(sides[s.name], kept[s.name], 0))]
    return [Source(s.name, s.maker) if s.name in left else s for s in sources]


def _written_infinity(op: Op) -> bool:
    """Whether an infinity stands among the operation's own numbers (`x + float("-inf")`)."""
    return any(isinstance(v, float) and v in (float("inf"), float("-inf")) for v in op.scalars.values())
