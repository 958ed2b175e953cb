"""The graph of a traced step: operations, the tensors between them, and the colour of each value.

Colours tell damage from intent:

    CLEAN       finite
    UNWRITTEN   garbage of memory nobody wrote yet (`empty`)
    DELIBERATE  an infinity (or NaN) written on purpose: masked_fill, full, a constant, log of a 0/1 mask
    DAMAGE      everything else that is not finite
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from whynan.capsule.sites import Site
from whynan.records import ModuleState
from whynan.tripwire.values import CLEAN, Damage, plain

OUTSIDE = "made outside of torch"  # the role of what a Function of the program computes by other means


class Colour(IntEnum):
    """What a non-finite value is."""

    CLEAN = 0
    UNWRITTEN = 1
    DELIBERATE = 2
    DAMAGE = 3


@dataclass(slots=True)
class Leaf:
    """A tensor that no traced operation made."""

    tensor: torch.Tensor
    role: str  # parameter | buffer | input | gradient | state | constant | OUTSIDE
    name: str
    damage: Damage = CLEAN
    colour: Colour = Colour.CLEAN
    used_at: Site | None = None
    written_at: Site | None = None  # the step wrote to it before it used it
    first_use: int = -1

    def dense(self) -> torch.Tensor:
        """Return its values as a plain tensor."""
        found = plain(self.tensor.detach())
        return self.tensor.detach() if found is None else found


@dataclass(slots=True)  # never changed; a frozen one takes twice as long to make
class Source:
    """One tensor argument of an operation: its name in the schema and who made it."""

    name: str
    maker: int  # index of an operation, or -1 - index of a leaf
    damage: Damage = CLEAN
    colour: Colour = Colour.CLEAN


@dataclass(slots=True)
class Op:
    """One dispatched operation."""

    index: int
    name: str
    sources: list[Source]
    scalars: dict[str, Any]
    site: Site | None
    module: str
    backward: bool  # autograd's own: of the way back, or a tangent
    node: int  # backward: number of the autograd node that runs; forward: of the node it made, or -1; below that for a tangent
    call: str  # the Python-level function it ran under (`torch.nn.functional.normalize`)
    entry: int
    kind: str  # kind of the tape entry
    in_module: bool = False
    live: bool = False  # the user's own code called it during the replay: its site is exact for this very operation
    scripted: bool = False  # inside a TorchScript module, whose lines nobody sees
    shape: tuple[int, ...] = ()
    dtype: str = ""
    damage: Damage = CLEAN
    colour: Colour = Colour.CLEAN
    error: BaseException | None = None

    @property
    def tangent(self) -> bool:
        """Whether it belongs to a derivative that forward mode carries along with the values (`jacfwd`)."""
        return self.node < -1


@dataclass(slots=True)
class Graph:
    """All operations of one traced run, and where every value came from."""

    ops: list[Op] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    node_maker: dict[int, int] = field(default_factory=dict)  # autograd node number: operation that made it
    sites: dict[int, Site | None] = field(default_factory=dict)  # tape entry: the user's line that made the call
    by_number: set[int] = field(default_factory=set)  # operations that were given a bad number which went through Python since it was read out of a tensor
    modules: dict[str, ModuleState] = field(default_factory=dict)  # by their path in the model, in the order they ran

    def forward_of(self, op: Op) -> Op | None:
        """Return the forward operation whose autograd node a backward operation belongs to."""
        made = self.node_maker.get(op.node) if op.backward else None
        return None if made is None else self.ops[made]

    def maker(self, source: Source) -> Op | Leaf:
        """Return what made an argument."""
        return self.ops[source.maker] if source.maker >= 0 else self.leaves[-1 - source.maker]
