"""What a report shows beside the verdict: the way the damage took, the values at its origin, the modules it reached.

Made once an incident is diagnosed, from what the replay has kept; it needs no further replay.
"""

from __future__ import annotations

from typing import TypedDict

import torch

from whynan.capsule.sites import resolve
from whynan.errors import let_through
from whynan.records import NOWHERE, Histogram, ModuleState, Origin, Phase, Stage, Symptom
from whynan.trace.birth import Birth, View
from whynan.trace.graph import Leaf, Op
from whynan.trace.modules import MOST as MOST_MODULES
from whynan.trace.saying import called
from whynan.trace.slicing import HAND_ON, base, follow
from whynan.tripwire.histograms import histogram
from whynan.tripwire.values import stats

FIRST, LAST = 12, 8  # stages listed of a long way
_ARGUMENTS = 3
_HISTOGRAMS = 3


class Particulars(TypedDict, total=False):
    """The fields of an incident that are made here."""

    path: tuple[Stage, ...]
    histograms: tuple[Histogram, ...]
    modules: tuple[ModuleState, ...]


def particulars(birth: Birth | None, symptom: Symptom, origin: Origin) -> Particulars:
    """Return them; a failure here must not cost the diagnosis."""
    if birth is None:
        return {}
    try:
        listed = [m for m in birth.graph.modules.values() if m.name or m.largest is not None or m.weight_largest is not None]
        return {"path": tuple(_path(birth, symptom)), "histograms": tuple(_histograms(birth, origin)), "modules": tuple(listed[:MOST_MODULES])}
    except Exception as error:
        let_through(error)
        return {}


def _path(birth: Birth, symptom: Symptom) -> list[Stage]:
    found = [*_before(birth), _origin(birth)]
    start = birth.op.index if birth.op is not None else _leaf_index(birth)
    way = follow(start, birth.slice.after)[1:] or [i for i in birth.slice.path[1:] if i != start]
    found += _shortened(_joined(birth, [birth.graph.ops[i] for i in way if i >= 0]))
    note = f"is {symptom.kind}" if symptom.kind == "absurd" else f"holds {symptom.kind}"
    return [*found, Stage("symptom", f"{symptom.place} {symptom.name}" if symptom.name != symptom.place else symptom.place, note=note)]


def _leaf_index(birth: Birth) -> int:
    return -1 - next((n for n, leaf in enumerate(birth.graph.leaves) if leaf is birth.leaf), 0)


def _before(birth: Birth) -> list[Stage]:
    """The arguments of the operation at fault and, for a derivative, the forward operation it belongs to."""
    view = birth.forward
    if view is None:
        return []
    kept = view.inputs()
    stages = [_argument(view, source.name, kept.get(source.name)) for source in view.op.sources[:_ARGUMENTS]]
    return stages + ([_stage("forward", view.op, birth)] if birth.op is not None and view.op is not birth.op else [])


def _argument(view: View, name: str, tensor: torch.Tensor | None) -> Stage:
    made = view.maker(name)
    value = stats(name, tensor) if tensor is not None else None
    if isinstance(made, View):
        return Stage("argument", called(made.op), _phase(made.op), made.op.module, resolve(made.site), value, f"argument {name!r}")
    label = " ".join(filter(None, (made.role, made.name))) if isinstance(made, Leaf) else "number"
    return Stage("argument", label, Phase.INPUT if isinstance(made, Leaf) and made.role == "input" else "", "", NOWHERE, value, f"argument {name!r}")


def _origin(birth: Birth) -> Stage:
    if birth.op is not None:
        return _stage("origin", birth.op, birth)
    leaf = birth.leaf
    if leaf is None:
        return Stage("origin", "not known")
    shown = birth.handed_in() if birth.phase is Phase.INPUT else leaf.dense()
    return Stage("origin", " ".join(filter(None, (leaf.role, leaf.name))), birth.phase, "", resolve(leaf.used_at), stats(leaf.name or leaf.role, shown))


def _stage(role: str, op: Op, birth: Birth) -> Stage:
    tensor = birth.outputs.get(op.index)
    forward = birth.graph.forward_of(op) if op.backward and not op.live else None
    place = forward or op
    value = stats("result", tensor) if tensor is not None else None
    return Stage(role, called(op), _phase(op), place.module, resolve(place.site), value, "" if value is not None else _damage(op))


def _phase(op: Op) -> str:
    return Phase.BACKWARD if op.backward else Phase.OPTIMIZER if op.kind in ("clip", "optimizer") else Phase.FORWARD if op.in_module else Phase.LOSS


def _damage(op: Op) -> str:
    shape = f"{op.dtype}{list(op.shape)}" if op.dtype else ""
    return ", ".join(filter(None, (shape, f"holds {op.damage.kind}" if op.damage else "")))


def _joined(birth: Birth, ops: list[Op]) -> list[Stage]:
    """The operations that carried the damage on, without views and copies, and one of several alike."""
    found: list[Stage] = []
    for op in (o for o in ops if not {base(o), called(o)}.intersection(HAND_ON) or o is ops[-1]):
        stage = _stage("carried", op, birth)
        last = found[-1] if found else None
        if last is not None and (last.op, last.span, last.module, last.phase) == (stage.op, stage.span, stage.module, stage.phase):
            continue
        found.append(stage)
    return found


def _shortened(stages: list[Stage]) -> list[Stage]:
    if len(stages) <= FIRST + LAST:
        return stages
    gap = len(stages) - FIRST - LAST
    marked = stages[-LAST]
    again = Stage(marked.role, marked.op, marked.phase, marked.module, marked.span, marked.value, marked.note, gap)
    return [*stages[:FIRST], again, *stages[-LAST + 1 :]]


def _histograms(birth: Birth, origin: Origin) -> list[Histogram]:
    """The values at the origin, under the names that the diagnosis gives them."""
    view = birth.forward
    if birth.leaf is not None:
        named = [(birth.leaf.name or birth.leaf.role, birth.handed_in() if birth.phase is Phase.INPUT else birth.leaf.dense())]
    elif view is not None:
        named = [(given.name, tensor) for given, tensor in zip(origin.inputs, view.inputs().values(), strict=False)]
        output = view.output()
        named += [("result", output)] if output is not None else []
    else:
        named = []
    made = (histogram(name, tensor) for name, tensor in named)
    return [h for h in made if h is not None][:_HISTOGRAMS]
