"""Find the operation at which a finite step became absurd, by holding it against a healthy step with the same weights.

Both steps are replayed and the size of every result is taken. A result hundreds of times the size it has in the healthy
step, made of arguments of the usual size, is where the jump was born. Values that grow little by little have no such
place, and none is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from whynan.capsule.replay import Program, Run
from whynan.capsule.sites import Site
from whynan.records import number
from whynan.trace.birth import Birth
from whynan.trace.graph import Graph, Leaf, Op
from whynan.trace.locate import Targets, birth_in, module_names, observe, scalars
from whynan.trace.memory import roles_of
from whynan.trace.mending import Place, places_of
from whynan.trace.modules import largest
from whynan.trace.slicing import Slice, base
from whynan.trace.terms import terms_of
from whynan.trace.tracer import Tracer
from whynan.tripwire.checks import total_norm

ABSURD = 300.0  # times the size in a healthy step: too much
USUAL = 30.0  # times that size: still an argument of the usual size
NEAR = 100.0  # times the level of the curve: the spike is gone

Key = tuple[Site | None, str, str, str, bool]


@dataclass(frozen=True, slots=True)
class Jump:
    """A finite loss or gradient norm far outside what it was, and where that began."""

    name: str  # loss | gradient norm
    value: float
    level: float
    size: float = 0.0  # largest magnitude at the place of birth
    usual: float = 0.0  # the same in healthy steps
    explains: bool = False  # with the usual size there, the spike is gone
    after: str = ""  # what the step gave then

    def beyond(self, loss: float | None, norm: float | None) -> bool:
        """Whether numbers are still far outside what they were."""
        value = loss if self.name == "loss" else norm
        return value is not None and not abs(value) <= NEAR * abs(self.level)


@dataclass(slots=True)
class Sizes:
    """The size of everything in one traced step."""

    graph: Graph
    results: dict[int, float] = field(default_factory=dict)  # by operation
    given: dict[tuple[int, str], float] = field(default_factory=dict)  # by operation and argument
    starts: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Meter(Tracer):
    """A tracer that takes the size of every result and of what was handed in."""

    def __init__(self, roles: dict[int, tuple[str, str]]) -> None:
        super().__init__(roles)
        self.sizes = Sizes(self.graph)

    def _made(self, op: Op, args: Any, result: Any) -> None:
        size = max(filter(None, map(largest, _floats(result))), default=0.0)
        if size:
            self.sizes.results[op.index] = size
        for source in op.sources:
            made = self.graph.maker(source)
            if isinstance(made, Op):
                given = self.sizes.results.get(made.index, 0.0)
            else:
                given = (largest(made.tensor) if made.tensor.is_floating_point() else None) or 0.0
            self.sizes.given[op.index, source.name] = given


def find_jump(program: Program, healthy: Iterable[Program], targets: Targets, jump: Jump) -> tuple[Birth, Jump] | None:
    """Return the birth of a spike with its values, or nothing where no single place is to blame.

    Cost: one traced replay of the step and of each healthy one, and two more where a place is found.
    """
    usual = _usual([_measure(other, targets).sizes for other in healthy])
    if not usual:
        return None
    meter = _measure(program, targets)
    sizes = meter.sizes
    found, grown = _births(sizes, usual)
    if not found.births and not found.leaves:
        return None
    birth = birth_in(sizes.graph, found)
    birth.losses, birth.terms = sizes.losses, terms_of(sizes.graph, next(iter(sizes.starts), -1))
    reason = program.inexact() or meter.broken
    birth.exact, birth.note = not reason, reason
    size = sizes.results.get(birth.op.index, 0.0) if birth.op is not None else largest(birth.leaf.tensor) or 0.0 if birth.leaf is not None else 0.0
    place = birth.op.index if birth.op is not None else _index(sizes.graph, birth.leaf)
    told = Jump(jump.name, jump.value, jump.level, size, size / grown[place])
    return observe(program, targets, {}, birth), _damped(program, birth, usual, told)


def _measure(program: Program, targets: Targets) -> Meter:
    meter = Meter(roles_of(program))
    with program.still(), module_names(program.roots, meter), meter:
        run = program.play(meter)
        with meter.blind():
            ends = [*run.losses, *(p.grad for p in program.leaves if p.grad is not None), *targets(run)] if run.error is None else []
            meter.sizes.starts = list(dict.fromkeys(meter.maker_of(t) for t in ends))
            meter.sizes.losses = scalars(run)
    return meter


def _key(graph: Graph, op: Op) -> Key:
    """Name an operation so that another step has it too: its line, its module, and what it is the derivative of."""
    forward = graph.forward_of(op) if op.backward and not op.live else None
    place = forward or op
    return place.site, place.module, base(place), base(op), op.backward


def _usual(steps: list[Sizes]) -> dict[tuple[Key, str], float]:
    """Return the largest size of each result and argument over healthy steps."""
    usual: dict[tuple[Key, str], float] = {}
    for sizes in steps:
        ops = sizes.graph.ops
        seen = [((_key(sizes.graph, ops[i]), ""), size) for i, size in sizes.results.items()]
        seen += [((_key(sizes.graph, ops[i]), name), size) for (i, name), size in sizes.given.items()]
        for key, size in seen:
            usual[key] = max(size, usual.get(key, 0.0))
    return usual


def _births(sizes: Sizes, usual: dict[tuple[Key, str], float]) -> tuple[Slice, dict[int, float]]:
    """Follow what is absurd back to where its arguments are of the usual size; also return how many times that size everything has.

    What no healthy step has made is measured by those who use it.
    """
    graph, found, grown = sizes.graph, Slice(), {}
    for index in sizes.starts:
        if index >= 0:
            grown[index] = _ratio(sizes.results.get(index), usual.get((_key(graph, graph.ops[index]), "")))
    todo = [index for index, times in grown.items() if times >= ABSURD]
    while todo:
        index = todo.pop()
        if index in found.reached:
            continue
        found.reached.add(index)
        larger = _larger(sizes, usual, index) if index >= 0 else {}
        for maker, times in larger.items():
            grown[maker] = max(times, grown.get(maker, 0.0))
        todo += larger
        if not larger and grown[index] >= ABSURD:
            _note(graph, index, found)
    found.births.sort(key=lambda op: op.index)
    first = min((leaf.first_use for leaf in found.leaves), default=math.inf)
    if found.births and found.births[0].index < first:
        found.leaves.clear()
    elif found.leaves:
        found.births.clear()
    return found, grown


def _larger(sizes: Sizes, usual: dict[tuple[Key, str], float], index: int) -> dict[int, float]:
    """Return who made the arguments of an operation that are larger than usual there, and how much."""
    op = sizes.graph.ops[index]
    key = _key(sizes.graph, op)
    times = {s.maker: _ratio(sizes.given.get((index, s.name)), usual.get((key, s.name))) for s in op.sources}
    return {maker: ratio for maker, ratio in times.items() if ratio >= USUAL}


def _ratio(size: float | None, usual: float | None) -> float:
    return size / usual if size and usual else 1.0


def _note(graph: Graph, index: int, found: Slice) -> None:
    if index >= 0:
        found.births.append(graph.ops[index])
    else:
        found.leaves.append(graph.leaves[-1 - index])


def _index(graph: Graph, leaf: Leaf | None) -> int:
    return -1 - next(n for n, other in enumerate(graph.leaves) if other is leaf)


# -- the proof --------------------------------------------------------------------------------------------------------


class Damper(Tracer):
    """A tracer that keeps the results of chosen operations, and of their derivatives, at the size of healthy steps."""

    def __init__(self, roles: dict[int, tuple[str, str]], places: frozenset[Place], usual: dict[tuple[Key, str], float], size: float) -> None:
        super().__init__(roles)
        self.places, self.usual, self.size = places, usual, size  # `size` for what no healthy step has made

    def _made(self, op: Op, args: Any, result: Any) -> None:
        forward = self.graph.forward_of(op) if op.backward and not op.live else None
        born = forward or op
        limit = self.usual.get((_key(self.graph, op), ""), self.size)
        if limit and (born.entry, born.index - self.first.get(born.entry, 0)) in self.places:
            for tensor in _floats(result):
                with self._changing(tensor):
                    tensor.detach().clamp_(-limit, limit)


def _damped(program: Program, birth: Birth, usual: dict[tuple[Key, str], float], jump: Jump) -> Jump:
    """Play the step with the usual size at one place; say whether that takes the spike away."""
    if birth.op is None:
        return jump
    damper = Damper(roles_of(program), places_of(birth), usual, jump.usual)
    with program.still(), module_names(program.roots, damper), damper:
        run = program.play(damper)
        with damper.blind():
            loss, norm = _outcome(program, run)
    gone = run.error is None and not jump.beyond(loss, norm)
    words = [f"{name} {number(value)}" for name, value in (("loss", loss), ("gradient norm", norm)) if value is not None]
    return Jump(jump.name, jump.value, jump.level, jump.size, jump.usual, gone, ", ".join(words))


def _outcome(program: Program, run: Run) -> tuple[float | None, float | None]:
    losses = scalars(run)
    grads = [p.grad.detach().to_dense() if p.grad.is_sparse else p.grad.detach() for p in program.leaves if p.grad is not None]
    norm = total_norm(grads)
    return losses[-1] if losses else None, None if norm is None else float(norm)


def _floats(result: Any) -> list[torch.Tensor]:
    found = result if isinstance(result, list | tuple) else [result]
    return [t for t in found if isinstance(t, torch.Tensor) and t.is_floating_point()]
