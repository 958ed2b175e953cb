"""Replay a step under the tracer and find where its damage was born."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import current_thread
from typing import Any

import torch
from torch.nn.modules import module as module_hooks

from whynan.capsule.raised import blamed, unsolved
from whynan.capsule.replay import Program, Run, call_entry
from whynan.capsule.setup import Behind
from whynan.capsule.tape.entries import Slot
from whynan.capsule.tape.needs import needed_for
from whynan.records import Phase, TensorStats
from whynan.trace.birth import FOLLOWED, Birth, ancestors, followers
from whynan.trace.graph import OUTSIDE, Colour, Graph, Leaf, Op
from whynan.trace.inside import named_values
from whynan.trace.memory import roles_of, storage_key
from whynan.trace.modules import Outputs, paths_of
from whynan.trace.scouting import Scouted, scout
from whynan.trace.slicing import Slice, of_a_bad_value, real_use, slice_back
from whynan.trace.terms import terms_of
from whynan.trace.tracer import Tracer
from whynan.tripwire.values import damage_of, damaged

LOSS = "\0"  # stands for a loss module in the stack of module names
Targets = Callable[[Run], list[torch.Tensor]]


@dataclass(slots=True)
class Traced:
    """One traced run: the graph, and the indices that made the bad targets."""

    tracer: Tracer
    run: Run
    starts: list[int]
    loss: int = -1  # the operation that made the loss: a bad one, else the last
    inside: list[TensorStats] = field(default_factory=list)


def locate(
    program: Program, targets: Targets, roles: dict[int, tuple[str, str]] | None = None, suspects: frozenset[int] = frozenset(), meant: bool = True
) -> Birth | None:
    """Find the birth of the damage in the targets of a program; None when the replay is finite.

    `suspects` are storages known to be bad (weights before the first step): their first use is the answer even where
    the damage has not reached a target yet. With `meant`, infinities that the loop writes into its batch are masks.

    Cost: two replays under a dispatch mode, three on a GPU.
    """
    first = _trace(program, targets, roles or {}, scouted=scout(program), meant=meant)
    error = first.run.error
    graph = first.tracer.graph
    starts = first.starts
    if not starts:
        failing = first.tracer.failing(error) or _unsolved(first.tracer, error)
        starts = _behind(first.tracer, failing, error)
        if not starts and failing is not None:
            birth = Birth(graph, Slice(births=[failing]), failing, None, _phase(graph, failing), error=error)
            birth = observe(program, targets, roles or {}, birth)
            birth.inputs.setdefault(failing.index, first.tracer.refused)
            return birth
        if not starts:
            used = next((leaf for leaf in graph.leaves if storage_key(leaf.tensor) in suspects), None)
            return None if used is None else Birth(graph, Slice(), None, used, _leaf_phase(used), losses=scalars(first.run))
    found = slice_back(graph, starts if first.run.losses else _inner_loss(graph) or starts)
    losses = scalars(first.run)
    found = found if all(map(math.isfinite, losses)) else of_a_bad_value(graph, found)
    birth = _thrown_away(graph, found, losses) or birth_in(graph, found)
    birth.losses, birth.terms = losses, terms_of(graph, first.loss)
    reason = program.inexact() or first.tracer.broken or _unseen(birth)
    birth.exact, birth.note = not reason, reason
    return observe(program, targets, roles or {}, birth)


def graph_of(program: Program) -> Graph:
    """Return the graph of a step that is finite.

    Cost: one replay under a dispatch mode.
    """
    return _trace(program, lambda run: [], {}).tracer.graph


def _unseen(birth: Birth) -> str:
    """Say why the line of a birth is only that of a call, or nothing."""
    scripted = birth.forward is not None and birth.forward.op.scripted
    return (
        "inside a TorchScript module, whose lines are not seen, the line that calls it is named; for an exact answer train it without torch.jit.script"
        if scripted
        else ""
    )


@dataclass(frozen=True, slots=True)
class Made:
    """The birth of a bad value outside of the steps, and the calls that made it: which results of theirs the step reads, in which tensors."""

    birth: Birth
    program: Program
    slots: tuple[Slot, ...]
    tensors: tuple[torch.Tensor, ...]  # none where the step reads copies
    when: str

    def targets(self, run: Run) -> list[torch.Tensor]:
        """Return these results in a replay: fewer, if it ended before."""
        return [run.made[slot] for slot in self.slots if slot in run.made]


def setup_birth(program: Program, birth: Birth, data: Iterable[torch.Tensor] = ()) -> Made | None:
    """Find the birth of a bad value behind another one, made before the first step or in an earlier one; None where it was made of nothing.

    `data` is what the batch was cut out of.
    """
    read = [birth.leaf] if birth.leaf is not None else infinities_behind(birth)
    for tensor in [*(leaf.tensor for leaf in read if leaf.damage), *(t for t in data if damage_of(t.detach()))]:
        behind = program.recorder.beside.setup.behind(tensor, program.recorder.tape)
        if behind is not None:
            return _made_before(program, behind, {id(leaf.tensor): leaf.tensor for leaf in (*read, *birth.graph.leaves) if leaf.damage})
    return None


def _made_before(program: Program, first: Behind, bad: dict[int, torch.Tensor]) -> Made | None:
    """Find the birth, and what else of the bad values that a step reads the same calls lead to."""
    recorder = program.recorder
    known = [(behind, tensor) for tensor in bad.values() if (behind := recorder.beside.setup.behind(tensor, recorder.tape)) is not None]
    calls = Program(recorder, list(first.entries), [])
    calls.given.update(first.given)
    found = _made_of_finite(calls, first.slot, (), first.when)
    if found is None or not known:
        return found
    entries = {e.number: e for behind in (first, *(b for b, _ in known)) for e in behind.entries}
    calls.entries = [entries[number] for number in sorted(entries)]
    return replace(found, slots=tuple(b.slot for b, _ in known), tensors=tuple(tensor for _, tensor in known))


def weights_birth(program: Program, birth: Birth) -> Made | None:
    """Find the birth of a bad weight that the program itself has made since the update before, or before this optimizer: a projection, an average, a soup.

    It is looked for by its value: the program may have loaded or copied it. None where the tape does not show it.
    """
    tape, leaf, before = program.recorder.tape, birth.leaf, program.recorder.beside.setup.before
    if leaf is None or leaf.role not in ("parameter", "buffer") or leaf.first_use >= len(birth.graph.ops):
        return None
    used = next((e.number for e in program.entries if e.runs_model), birth.graph.ops[leaf.first_use].entry)
    calls = before | {n: entry for n, entry in tape.entries.items() if tape.rolled < n < used}
    between = {n for n, entry in calls.items() if entry.kind in ("call", "write")}
    if not between:
        return None
    made = Program(program.recorder, needed_for(before | tape.entries, between, tape.rolled), [], on_weights=True)
    for slot in reversed(_slots_like(made, leaf.tensor.detach().clone())):
        last = Program(program.recorder, needed_for({e.number: e for e in made.entries}, {slot.entry}, made.entries[0].number - 1), [], on_weights=True)
        if (found := _made_of_finite(last, slot, (leaf.tensor,), "before this step began")) is not None:
            return found
    return None


def _slots_like(program: Program, bad: torch.Tensor) -> list[Slot]:
    """Return the results of some calls that have the values of a weight: the first (others may be copies of it) and the last (it may be written in place)."""
    try:
        with program.still():
            made = program.play().made
            alike = [slot for slot, tensor in made.items() if isinstance(slot, Slot) and _is_same(tensor, bad)]
    except MemoryError:
        return []
    return alike[:1] + alike[1:][-3:]


def _is_same(tensor: torch.Tensor, bad: torch.Tensor) -> bool:
    if tensor.shape != bad.shape or tensor.dtype is not bad.dtype or tensor.layout is not bad.layout or tensor.is_meta or bad.is_meta:
        return False
    tensor = tensor.to(bad.device)
    return bool(((tensor == bad) | (tensor.isnan() & bad.isnan())).all())


def _made_of_finite(calls: Program, slot: Slot, tensors: tuple[torch.Tensor, ...], when: str) -> Made | None:
    """Find the birth of what some calls outside of a step have made, where they were given nothing bad."""
    try:
        first = locate(calls, lambda run: [run.made[slot]] if slot in run.made else []) if not calls.inexact() else None
    except MemoryError:
        return None
    if first is None or first.op is None or first.op.colour is not Colour.DAMAGE or not first.op.sources or any(s.damage for s in first.op.sources):
        return None
    return Made(first, calls, (slot,), tensors, when)


def infinities_behind(birth: Birth) -> list[Leaf]:
    """Return the tensors from outside whose infinities the operation of a birth reads: taken for meant, they went through others before."""
    found: list[Leaf] = []
    seen: set[int] = set()
    todo = list(birth.forward.op.sources) if birth.forward is not None else []
    while todo:
        source = todo.pop()
        if not source.damage or source.maker in seen:
            continue
        seen.add(source.maker)
        made = birth.graph.maker(source)
        if isinstance(made, Leaf):
            found.append(made)
        elif made.colour is Colour.DELIBERATE:
            todo += made.sources
    return found


def _inner_loss(graph: Graph) -> list[int]:
    """Return the loss that `torch.func.grad` keeps to itself, if it is bad: the number that was made last before the way back began."""
    turn = next((op.index for op in graph.ops if op.backward and not op.tangent), 0)
    last = next((op for op in reversed(graph.ops[:turn]) if op.shape == () and "ones_like" not in op.name), None)
    return [last.index] if last is not None and last.colour is Colour.DAMAGE else []


def _behind(tracer: Tracer, failing: Op | None, error: BaseException | None) -> list[int]:
    """An exception over values that were not finite is a symptom: return what made the values it complains about."""
    if failing is not None:
        return [s.maker for s in failing.sources if s.damage.nan and s.colour is Colour.DAMAGE]
    if error is None:
        return []
    with tracer.blind():
        return list(dict.fromkeys(tracer.maker_of(t) for t in blamed(error)))


def _unsolved(tracer: Tracer, error: BaseException | None) -> Op | None:
    """Return the factorisation that reported a failure to a program which then raised."""
    if error is None:
        return None
    with tracer.blind():
        makers = [tracer.maker_of(info) for info in unsolved(error)]
    return next((tracer.graph.ops[i] for i in makers if i >= 0 and "linalg" in tracer.graph.ops[i].name), None)


def birth_in(graph: Graph, found: Slice) -> Birth:
    """Return the first birth of a slice, without values."""
    op, leaf = _first_birth(graph, found)
    if leaf is not None and leaf.role == "input":
        _hand_in(graph, leaf)
    elif leaf is not None and leaf.role == "parameter":
        _read_in(graph, leaf)
    return Birth(graph, found, op, leaf, _phase(graph, op) if op is not None else _leaf_phase(leaf))


def _thrown_away(graph: Graph, found: Slice, losses: list[float]) -> Birth | None:
    """A NaN handed in that never reached the loss was selected away: the gradient is born where the way back meets it.

    Only selection takes a NaN out of a result. One that went through the model stays the input's own fault.
    """
    if not losses or not all(map(math.isfinite, losses)) or found.births:
        return None
    if not all(leaf.role == "input" and leaf.damage.nan for leaf in found.leaves) or not found.leaves:
        return None
    reached = [graph.ops[i] for i in sorted(found.reached) if i >= 0]
    if any(op.in_module for op in reached if not op.backward):
        return None
    meeting = next((op for op in reached if op.backward and not op.live and _meets_gradient(graph, op)), None)
    return None if meeting is None else Birth(graph, Slice([meeting], found.leaves, found.path, [], found.reached), meeting, None, Phase.BACKWARD)


def _meets_gradient(graph: Graph, op: Op) -> bool:
    """Whether a sound gradient goes into an operation of the way back."""
    return any(s.maker >= 0 and graph.ops[s.maker].backward and s.colour is not Colour.DAMAGE for s in op.sources)


def _hand_in(graph: Graph, leaf: Leaf) -> None:
    """A batch comes in where it is computed with, not where it is compared with something or cut out of the data."""
    number = next(-1 - i for i, other in enumerate(graph.leaves) if other is leaf)
    taken_on = (op.index for op in graph.ops[max(leaf.first_use, 0) :] if op.damage and any(s.maker == number for s in op.sources))
    use = real_use(graph.ops, next(taken_on, leaf.first_use))
    if use != leaf.first_use:
        leaf.first_use, leaf.used_at = use, graph.sites.get(graph.ops[use].entry) or leaf.used_at


def _read_in(graph: Graph, leaf: Leaf) -> None:
    """A weight that the step itself writes to (`clamp_`) is read where its module computes with it."""
    use: Op | None = graph.ops[leaf.first_use] if 0 <= leaf.first_use < len(graph.ops) else None
    while use is not None and use.kind == "write":
        written = use.index
        use = next((op for op in graph.ops[written + 1 :] if any(s.maker == written for s in op.sources)), None)
    if use is not None and use.index != leaf.first_use:
        leaf.first_use, leaf.used_at = use.index, use.site


def _first_birth(graph: Graph, found: Slice) -> tuple[Op | None, Leaf | None]:
    """A bad leaf (input, weight, buffer) explains later births; otherwise the earliest operation."""
    bad = [leaf for leaf in found.leaves if leaf.colour is Colour.DAMAGE]
    if bad and (not found.births or min(leaf.first_use for leaf in bad) <= found.births[0].index):
        return None, min(bad, key=lambda leaf: leaf.first_use)
    if found.births:
        return found.births[0], None
    return None, found.leaves[0] if found.leaves else None


def observe(program: Program, targets: Targets, roles: dict[int, tuple[str, str]], birth: Birth) -> Birth:
    """Run a step once more, keeping the values around a birth."""
    keep: list[int] = []
    hold = birth.forward.op.index if birth.forward is not None else birth.leaf.first_use if birth.leaf is not None else -1
    if birth.op is not None:
        forward = birth.graph.forward_of(birth.op)
        keep = [birth.op.index] + ([forward.index] if forward else []) + birth.slice.path[:12]
        for index in (birth.op.index, forward.index if forward else None):
            if index is not None:
                keep += ancestors(birth.graph, index, depth=10, limit=60)
        keep += [b.index for b in birth.slice.births[:4]]
        if birth.op.backward:
            keep += [op.index for op in birth.graph.ops[birth.op.index :] if op.backward and op.node == birth.op.node][:12]  # what came into the node
        if birth.op.backward or (birth.losses and all(map(math.isfinite, birth.losses))):  # something there may throw bad values away
            keep += followers(birth.graph, hold, depth=FOLLOWED, limit=40)
    elif birth.leaf is not None:
        keep = [birth.leaf.first_use]
    keep += [term.index for term in birth.terms.all()] if birth.terms is not None else []
    wanted = frozenset(i for i in keep if i >= 0)
    if not wanted:
        return birth
    second = _trace(program, targets, roles, wanted, hold)
    birth.inside, birth.caller, birth.between = second.inside, second.tracer.caller, second.tracer.between
    ops = birth.graph.ops
    if any(index >= len(ops) or ops[index].name != name for index, name in second.tracer.seen.items()) or not second.tracer.seen.keys() >= wanted:
        birth.exact, birth.note = False, birth.note or "two replays of this step did not make the same calls"
        return birth  # the values are those of other operations
    birth.inputs, birth.outputs, birth.members = second.tracer.kept_inputs, second.tracer.kept_output, second.tracer.members
    return birth


def _trace(
    program: Program,
    targets: Targets,
    extra: dict[int, tuple[str, str]],
    keep: frozenset[int] = frozenset(),
    hold: int = -1,
    scouted: Scouted | None = None,
    meant: bool = True,
) -> Traced:
    tracer = Tracer({}, keep)
    tracer.meant = meant
    tracer.hold = hold
    if keep and all(entry.kind != "function" for entry in program.entries):  # a step function does more than compute: it is played to its end
        tracer.last = max(*keep, hold)
    if scouted is not None:
        tracer.suspects, tracer.nan, tracer.clean = scouted.suspects, scouted.nan, scouted.clean
    outputs = Outputs(tracer.graph.modules)
    with program.still(), nullcontext() if keep else module_names(program.roots, tracer, outputs), tracer:
        with tracer.blind(), torch._C.DisableTorchFunction():
            tracer.roles = roles_of(program, extra)  # of the tensors that the step began with
        run = program.play(tracer)
        if not keep:
            with tracer.aside():
                outputs.read()
                outputs.weights(program.roots)
        starts = [] if keep else _bad_targets(tracer, targets(run) if run.error is None or run.losses else [])
        loss = -1 if keep else _loss(tracer, run.losses)
        inside = _inside(tracer)
    if scouted is not None and (tracer.broken or scouted.count != len(tracer.graph.ops) or _overlooked(tracer, starts)):
        return _trace(program, targets, extra, meant=meant)  # the two did not see the same step
    return Traced(tracer, run, starts, loss, inside)


def _overlooked(tracer: Tracer, starts: list[int]) -> bool:
    """Whether a bad target was made by something that was not looked at."""
    return any(start >= 0 and not tracer.graph.ops[start].damage for start in starts)


def _loss(tracer: Tracer, losses: list[torch.Tensor]) -> int:
    bad = _bad_targets(tracer, losses)
    with tracer.blind():
        return bad[0] if bad else tracer.maker_of(losses[-1]) if losses else -1


def _inside(tracer: Tracer) -> list[TensorStats]:
    """Read the variables of the function that was held, and let go of it."""
    found: list[TensorStats] = []
    frame, tracer.frame = tracer.frame, None
    if frame is not None:
        with tracer.aside():
            found = named_values(frame, call_entry.__code__)
    return found


def _bad_targets(tracer: Tracer, tensors: list[torch.Tensor]) -> list[int]:
    """Return the makers of the targets that are not finite."""
    with tracer.blind():
        bad = damaged([t.detach() for t in tensors])
        return list(dict.fromkeys(tracer.maker_of(t) for t, is_bad in zip(tensors, bad, strict=True) if is_bad))


def scalars(run: Run) -> list[float]:
    """Return the losses of a run as numbers."""
    return [float(t.detach().float().sum()) for t in run.losses]


def _of_a_gradient(graph: Graph, op: Op) -> bool:
    """Whether an operation after the backward pass works on gradients, or on what was computed from them: clipping and scaling by hand."""
    todo, seen = [op], {op.index}
    while todo:
        makers = [graph.ops[s.maker] for s in todo.pop().sources if s.maker >= 0 and s.maker not in seen]
        if any((made.backward and not made.tangent) or made.kind == "grad" for made in makers):
            return True
        seen.update(made.index for made in makers)
        todo += [made for made in makers if made.node < 0]
    return False


def _phase(graph: Graph, op: Op) -> Phase:
    if op.backward:
        return Phase.BACKWARD
    after = op.kind in ("write", "call") and op.node < 0  # what can be differentiated goes into a loss: a penalty on gradients
    if op.kind in ("clip", "grad", "optimizer") or (after and _of_a_gradient(graph, op)):
        return Phase.OPTIMIZER
    return Phase.FORWARD if op.in_module else Phase.LOSS


def _leaf_phase(leaf: Leaf | None) -> Phase:
    if leaf is not None and leaf.role in ("parameter", "buffer"):
        return Phase.PARAMETER
    if leaf is not None and leaf.role == OUTSIDE:
        return Phase.FORWARD
    return Phase.OPTIMIZER if leaf is not None and leaf.role == "state" else Phase.INPUT


@contextmanager
def module_names(roots: list[torch.nn.Module], tracer: Tracer, outputs: Outputs | None = None) -> Iterator[None]:
    """Tell the tracer which module runs, by its path in the model; look at what each gives back where that is wanted."""
    names, here = paths_of(roots), current_thread()

    def enter(module: torch.nn.Module, args: Any) -> None:
        if current_thread() is not here:
            return
        # torch's own loss modules are a way to write a function, not part of a model
        loss_function = not tracer.modules and isinstance(module, torch.nn.modules.loss._Loss)
        tracer.modules.append(LOSS if loss_function else names.get(module, type(module).__name__))
        tracer.scripted += isinstance(module, torch.jit.ScriptModule)

    def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
        if current_thread() is not here:
            return
        name = tracer.modules.pop() if tracer.modules else LOSS
        tracer.scripted -= isinstance(module, torch.jit.ScriptModule)
        if name is not LOSS and outputs is not None:
            with tracer.aside():
                outputs.look(name, module, output, tracer.knows_finite)

    first = module_hooks.register_module_forward_pre_hook(enter)
    last = module_hooks.register_module_forward_hook(leave, always_call=True)
    try:
        yield
    finally:
        first.remove()
        last.remove()
