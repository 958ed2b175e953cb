"""A birth with everything known about it: the operation, its values, who made them, and what became of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from whynan.capsule.sites import Site
from whynan.records import Phase, TensorStats
from whynan.trace.graph import Graph, Leaf, Op, Source
from whynan.trace.slicing import HAND_ON, Slice, base
from whynan.trace.terms import Term
from whynan.tripwire.values import damage_of

FOLLOWED = 6  # steps that a value is followed through the forward pass, to what throws it away


@dataclass(slots=True)
class View:
    """One operation together with the values kept of it."""

    op: Op
    birth: Birth

    @property
    def name(self) -> str:
        """The bare operation name, without in-place underscore: `div`, `log`, `_softmax`."""
        name = base(self.op)
        return name[:-1] if name.endswith("_") and not name.startswith("__") else name

    @property
    def site(self) -> Site | None:
        return self.op.site

    @property
    def call(self) -> str:
        """The Python-level function it ran under."""
        return self.op.call

    @property
    def member(self) -> int | None:
        """Which tensor of its lists went bad, of an operation that does the same to each of them (`_foreach_div`)."""
        return self.birth.members.get(self.op.index) if base(self.op).startswith(("_foreach_", "_fused_")) else None

    @property
    def sources(self) -> list[Source]:
        """The tensor arguments, of lists the member that went bad."""
        return [s for s in self.op.sources if self._concerns(s.name)]

    def _concerns(self, name: str) -> bool:
        return self.member is None or not name.endswith("]") or name.endswith(f"[{self.member}]")

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the kept tensor arguments by schema name, of lists the member that went bad."""
        kept = self.birth.inputs.get(self.op.index, {})
        return {name: tensor for name, tensor in kept.items() if self._concerns(name)}

    def input(self, name: str | int) -> torch.Tensor | None:
        """Return one kept argument, by schema name or position."""
        kept = self.inputs()
        if isinstance(name, int):
            names = [s.name for s in self.sources]
            return kept.get(names[name]) if name < len(names) else None
        return kept.get(name)

    def output(self) -> torch.Tensor | None:
        return self.birth.outputs.get(self.op.index)

    def scalar(self, name: str) -> object:
        """Return a non-tensor argument by schema name."""
        return self.op.scalars.get(name)

    def source(self, name: str | int) -> Source | None:
        if isinstance(name, int):
            return self.sources[name] if name < len(self.sources) else None
        return next((s for s in self.op.sources if s.name == name), None)

    def maker(self, name: str | int) -> View | Leaf | None:
        """Return what made an argument: an operation's view, a leaf, or nothing for a scalar."""
        source = self.source(name)
        if source is None:
            return None
        made = self.birth.graph.maker(source)
        return made if isinstance(made, Leaf) else View(made, self.birth)

    def parents(self) -> Iterator[View]:
        """Yield the views of the operations that made its arguments."""
        for index in range(len(self.op.sources)):
            made = self.maker(index)
            if isinstance(made, View):
                yield made


@dataclass(slots=True)
class Birth:
    """Where the damage was born."""

    graph: Graph
    slice: Slice
    op: Op | None  # None: born outside the step (a leaf), or never seen
    leaf: Leaf | None
    phase: Phase
    exact: bool = True
    note: str = ""
    inputs: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    members: dict[int, int] = field(default_factory=dict)  # of operations with several results: which one is the first bad
    losses: list[float] = field(default_factory=list)
    error: BaseException | None = None
    inside: list[TensorStats] = field(default_factory=list)  # the named values of the function it happened in
    terms: Term | None = None  # what the loss is the sum of
    caller: Site | None = None  # where the user's own code called the library that it happened in
    between: Site | None = None  # where that library called the helper that it happened in

    @property
    def derivative(self) -> bool:
        """Whether autograd's own arithmetic made it; a backward pass written by the user is code like any other."""
        return self.phase is Phase.BACKWARD and not (self.op is not None and self.op.live)

    @property
    def by_number(self) -> bool:
        """Whether the damage went on as a number in the loop's own Python, which is not run again: no change can be tried."""
        return not self.graph.by_number.isdisjoint(self.slice.reached)

    @property
    def view(self) -> View | None:
        """The operation of the birth."""
        return None if self.op is None else View(self.op, self)

    @property
    def forward(self) -> View | None:
        """For a backward birth: the forward operation whose derivative it is. Otherwise the birth itself."""
        if self.op is None:
            return None
        joined = None if self.op.live else self.graph.forward_of(self.op)  # a backward written by the user has its own line
        return View(joined, self) if joined is not None else self.view

    @property
    def site(self) -> Site | None:
        """The user's line; of a derivative's derivative, the line whose derivative was the first."""
        if self.leaf is not None:
            return self.leaf.used_at
        op = self.forward.op if self.forward is not None else None
        while op is not None and op.backward and not op.live and (made := self.graph.forward_of(op)) is not None and made.index < op.index:
            op = made
        return op.site if op is not None else None

    def handed_in(self) -> torch.Tensor:
        """For a bad leaf: the tensor as the step computes with it, the batch where it was cut out of a data set."""
        assert self.leaf is not None
        kept, own = self.inputs.get(self.leaf.first_use, {}), self.leaf.dense()
        return next((t for t in kept.values() if t.dim() and t.shape[1:] == own.shape[1:] and damage_of(t)), own)

    def path(self) -> list[View]:
        """Return the operations from the birth to the symptom."""
        return [View(self.graph.ops[i], self) for i in self.slice.path if i >= 0]


def ancestors(graph: Graph, start: int, depth: int, limit: int) -> list[int]:
    """Return the operations an operation's arguments were made by, nearest first; what hands a value on as it is does not count as a step."""
    found: list[int] = []
    level = [start]
    for _ in range(depth):
        following: list[int] = []
        for index in level:  # grows by what is looked through
            for source in graph.ops[index].sources:
                if source.maker >= 0 and source.maker not in found and source.maker != start:
                    found.append(source.maker)
                    (level if base(graph.ops[source.maker]) in HAND_ON else following).append(source.maker)
        level = following
        if len(found) >= limit:
            return found[:limit]
    return found


def followers(graph: Graph, start: int, depth: int, limit: int) -> list[int]:
    """Return the operations of the forward pass that take an operation's result, nearest first."""
    found: list[int] = []
    level = {start}
    for _ in range(depth):
        level = {op.index for op in graph.ops[start + 1 :] if not op.backward and any(s.maker in level for s in op.sources)}
        found += sorted(level.difference(found))
        if not level or len(found) >= limit:
            break
    return found[:limit]
