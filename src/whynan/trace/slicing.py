"""Slice back from a symptom to the operations where its damage was born.

The birth is the operation on the way whose inputs were usable and whose output was not. A deliberate infinity is
usable; what makes a NaN of it, or lets it into a sum that reaches the symptom, is the birth, and the place that wrote
the infinity is where it came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from whynan.trace.graph import Colour, Graph, Leaf, Op, Source

# operations that accept -inf as a number: log-probabilities, masks
_ACCEPT_NEGINF = ("_softmax", "_log_softmax", "logsumexp", "_safe_softmax", "logaddexp", "sigmoid", "_scaled_dot_product", "max", "amax", "_ctc_loss")
_EXPS = ("exp", "exp_", "exp2", "expm1")  # by their whole name: what expands is no exponential
# operations that give -inf only where there is nothing else
_REDUCE_NEGINF = ("logaddexp", "logaddexp2", "logsumexp", "logcumsumexp")
_LOGS = ("log", "log2", "log10", "log1p")
_ADD_UP = ("sum", "mean", "dot", "cumsum", "pow", "abs")
# operations that leave an infinity where it is
_CARRY = ("view", "_unsafe_view", "reshape", "expand", "transpose", "permute", "t", "clone", "detach", "alias", "unsqueeze", "squeeze",
          "slice", "select", "add", "sub", "mul", "div", "neg", "_to_copy", "copy_", "cat", "stack", "masked_fill", "masked_fill_", "where",
          "triu", "tril", "_log_softmax", "add_", "mul_", "unbind", "split", "lift_fresh", "unfold", "flatten", "repeat", "fill", "fill_",
          "index_put", "index_put_", "index_fill", "index_fill_", "slice_scatter", "select_scatter", "scatter", "scatter_")  # fmt: skip


# operations that hand on a part of the batch as it is
HAND_ON = ("lift_fresh", "slice", "select", "index", "view", "unsqueeze", "squeeze", "_to_copy", "detach", "alias", "t", "transpose",
            "expand", "clone", "reshape", "permute", "split", "unbind", "index_select")  # fmt: skip


@dataclass(slots=True)
class Slice:
    """What a slice found: births in order of execution, the way from the first birth to the symptom, and sources."""

    births: list[Op] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    written_by: list[Op | Leaf] = field(default_factory=list)  # who wrote the deliberate infinities a birth consumed
    reached: set[int] = field(default_factory=set)
    after: dict[int, int] = field(default_factory=dict)  # operation or leaf: the operation that took the damage on


def base(op: Op) -> str:
    """Return an operation's bare name.

    >>> base(Op(0, "aten.div.Tensor", [], {}, None, "", False, -1, "", -1, ""))
    'div'
    """
    parts = op.name.split(".")
    return parts[1] if len(parts) > 1 else op.name


def slice_back(graph: Graph, starts: list[int]) -> Slice:
    """Walk from the makers of bad values (`starts`) to the births."""
    found = Slice()
    births: dict[int, Op] = {}
    todo = list(starts)
    after = found.after
    while todo:
        index = todo.pop()
        if index in found.reached:
            continue
        found.reached.add(index)
        if index < 0:
            found.leaves.append(graph.leaves[-1 - index])
            continue
        op = graph.ops[index]
        parents = [s for s in op.sources if s.colour is Colour.DAMAGE and not _tolerates(op, graph, s)]
        if not parents:
            birth = op if op.colour is Colour.DAMAGE else _entry_of_infinity(graph, op, found, after)
            births[birth.index] = birth
        for source in parents:
            if source.maker not in found.reached:
                after.setdefault(source.maker, index)
                todo.append(source.maker)
    found.births = [births[i] for i in sorted(births)]
    if found.births:
        first = found.births[0]
        found.path = follow(first.index, after)
        found.written_by = writers_of(graph, first)
    elif found.leaves:
        found.leaves.sort(key=lambda leaf: leaf.first_use)
    return found


def of_a_bad_value(graph: Graph, found: Slice) -> Slice:
    """Go on from a derivative inside of a bad loss to the value it is taken of, where that is bad itself and nothing threw it away.

    `autograd.grad(u ** 1.5, x)` of a negative u: only the derivative goes into the loss, but what is wrong is the power.
    """
    first = found.births[0] if found.births else None
    value = None if first is None or first.live else graph.forward_of(first)
    while value is not None and value.backward and not value.live:
        made = graph.forward_of(value)
        value = made if made is not None and made.index < value.index else None
    if first is None or value is None or value.colour is not Colour.DAMAGE or _is_thrown_away(graph, value):
        return found
    made_of = slice_back(graph, [value.index])
    if not made_of.births:
        return found
    made_of.after.update({index: after for index, after in found.after.items() if index not in made_of.after})
    made_of.after.setdefault(value.index, first.index)
    made_of.path = follow(made_of.births[0].index, made_of.after)
    made_of.reached |= found.reached
    return made_of


def _is_thrown_away(graph: Graph, value: Op) -> bool:
    """Whether an operation of the forward pass that has a derivative made finite numbers of a bad value: a choice, a limit, an index."""
    bad = {value.index}
    for op in graph.ops[value.index + 1 :]:
        if op.backward or not any(s.maker in bad and s.damage for s in op.sources):
            continue
        if not op.damage and op.node >= 0:  # what has no derivative is a look at it: a mask, a metric
            return True
        bad.add(op.index)
    return False


def real_use(ops: list[Op], index: int) -> int:
    """Follow a tensor through slices, casts and views to the first operation that computes with it."""
    for _ in range(20):
        if index >= len(ops) or base(ops[index]) not in HAND_ON or ops[index].in_module:
            return index
        following = next((op.index for op in ops[index + 1 :] if op.damage and any(s.maker == index and s.damage for s in op.sources)), None)
        if following is None:
            return index
        index = following
    return index


def _tolerates(op: Op, graph: Graph, source: Source) -> bool:
    """Whether -inf is an ordinary argument of this operation, unless it is a gradient or came from an overflow."""
    if source.name.startswith("grad") or source.damage.nan or source.damage.posinf or not (base(op) in _EXPS or base(op).startswith(_ACCEPT_NEGINF)):
        return False
    return not _from_overflow(graph, source)


def _from_overflow(graph: Graph, source: Source) -> bool:
    seen: set[int] = set()
    todo = [source.maker]
    while todo:
        index = todo.pop()
        if index < 0 or index in seen:
            continue
        seen.add(index)
        op = graph.ops[index]
        bad = [s.maker for s in op.sources if s.colour is Colour.DAMAGE]
        if not bad and op.colour is Colour.DAMAGE and base(op) not in ("log", "log2", "log10", "log1p", "logsumexp", "logaddexp"):
            return True
        todo += bad
    return False


def _entry_of_infinity(graph: Graph, op: Op, found: Slice, after: dict[int, int]) -> Op:
    """Go from a symptom made of deliberate infinities to the operation that let them in: the first that does not just carry.

    No operation can use a NaN: one that was written is met where it is written.
    """
    chain = [op]
    while True:
        bad = [s for s in chain[-1].sources if s.damage and s.maker >= 0]
        if not bad:
            break
        after.setdefault(bad[0].maker, chain[-1].index)
        chain.append(graph.ops[bad[0].maker])
    if chain[-1].damage.nan:
        return chain[-1]
    reducing = [o for o in chain if base(o) in _REDUCE_NEGINF]
    if reducing:
        return reducing[-1]
    picking = [o for o in chain if base(o) in ("select", "slice", "unbind", "split")]
    if picking and all(base(o) in _CARRY for o in chain):
        return picking[0]  # the masked entry itself was picked, and carried from there
    if _takes_entries(graph, chain[-1]):
        return chain[-1]
    letting_in = [o for o in chain if base(o) not in _CARRY]
    if len(letting_in) > 1 and base(chain[-1]) in _LOGS and base(letting_in[-2]) in _ADD_UP:
        return chain[-1]  # a mask in the log domain is added to scores; one that is summed up is a log like any other
    return letting_in[-1] if letting_in and letting_in[-1] is not chain[-1] else (letting_in[0] if letting_in else chain[-1])


def _takes_entries(graph: Graph, op: Op) -> bool:
    """Whether an operation takes single entries out of an infinite tensor that no operation made: a table of scores, asked for those of a target."""
    table = next((s.maker for s in op.sources if s.damage), 0)
    if table >= 0 or base(op) not in ("index", "gather", "take"):
        return False
    by = sum(s.name.startswith("indices") for s in op.sources)
    return base(op) != "index" or by == graph.leaves[-1 - table].tensor.dim()


def follow(index: int, after: dict[int, int]) -> list[int]:
    """Return the way from an operation to the symptom."""
    path = [index]
    while index in after and len(path) < 10_000:
        index = after[index]
        path.append(index)
    return path


def writers_of(graph: Graph, birth: Op) -> list[Op | Leaf]:
    """Return what wrote the deliberate infinities that a birth consumed."""
    writers: list[Op | Leaf] = []
    seen: set[int] = set()
    todo = [s.maker for s in birth.sources if s.damage]
    while todo:
        index = todo.pop()
        if index in seen:
            continue
        seen.add(index)
        if index < 0:
            writers.append(graph.leaves[-1 - index])
            continue
        bad = [s.maker for s in graph.ops[index].sources if s.damage]
        if bad:
            todo += bad
        else:
            writers.append(graph.ops[index])
    return writers
