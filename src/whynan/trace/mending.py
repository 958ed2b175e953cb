"""Play a step with the damage of chosen births taken away: whether they alone explain it, and what remains.

The values an operation gave are made finite as they are born, in the forward pass and in its own derivative; damage
that arrives there from elsewhere is left as it is. What is the user's own is as before when the replay is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from whynan.capsule.replay import Program, Run
from whynan.capsule.tape.nested import tensors_of
from whynan.trace.birth import Birth, ancestors
from whynan.trace.graph import Colour, Graph, Leaf, Op
from whynan.trace.locate import Targets, birth_in, module_names, scalars
from whynan.trace.memory import roles_of, storage_key
from whynan.trace.modes import ReplayMode
from whynan.trace.scouting import waits
from whynan.trace.slicing import HAND_ON, Slice, slice_back
from whynan.trace.tracer import Tracer
from whynan.tripwire.values import damage_of, plain

Place = tuple[int, int]  # the tape entry, and the operation's number in it; a leaf is (-1, its number)


@dataclass(slots=True)
class Remains:
    """What is left of the damage: nothing, or births of its own."""

    graph: Graph
    found: Slice
    losses: list[float]
    error: BaseException | None

    @property
    def finite(self) -> bool:
        """Whether the step is finite now."""
        return self.error is None and not self.found.reached


def place_of(graph: Graph, born: Op | Leaf) -> Place:
    """Return where an operation or leaf stands, in words that hold for another replay too."""
    if isinstance(born, Leaf):
        return -1, next(i for i, leaf in enumerate(graph.leaves) if leaf is born)
    start = next(op.index for op in graph.ops if op.entry == born.entry)
    return born.entry, born.index - start


def places_of(birth: Birth) -> frozenset[Place]:
    """Return the places to mend so that a birth does not happen: itself, and the forward operation of a derivative."""
    if birth.leaf is not None:
        return frozenset([place_of(birth.graph, birth.leaf)])
    forward = birth.forward
    born = [op for op in (birth.op, forward.op if forward is not None else None) if op is not None]
    return frozenset(place_of(birth.graph, op) for op in born)


def without(program: Program, targets: Targets, mended: frozenset[Place]) -> Remains:
    """Play the step once with these births mended.

    Cost: one replay under a dispatch mode; on a GPU first one that looks only at these births and at the end, which is enough if that is finite.
    """
    if waits(program) and all(entry >= 0 for entry, _ in mended):
        hasty = _play(program, targets, mended, hasty=True)
        if not hasty.starts and hasty.error is None:
            return Remains(hasty.graph, Slice(), hasty.losses, None)
    tracer = _play(program, targets, mended)
    found = slice_back(tracer.graph, tracer.starts)
    return Remains(tracer.graph, found, tracer.losses, tracer.error)


def remaining_birth(program: Program, targets: Targets, mended: frozenset[Place], remains: Remains) -> Birth | None:
    """Return the first birth of what remains, with the values around it.

    Cost: one replay under a dispatch mode.
    """
    found = remains.found
    found.leaves = [leaf for leaf in found.leaves if place_of(remains.graph, leaf) not in mended]
    if not found.births and not found.leaves:
        return None
    birth = birth_in(remains.graph, found)
    birth.losses = remains.losses
    keep = {birth.op.index, *found.path[:12]} if birth.op is not None else set()
    if birth.op is not None:
        forward = birth.graph.forward_of(birth.op)
        keep |= {forward.index} if forward is not None else set()
        for index in list(keep)[:2]:
            keep |= set(ancestors(birth.graph, index, depth=10, limit=60)) if index >= 0 else set()
    elif birth.leaf is not None:
        keep = {birth.leaf.first_use}
    again = _play(program, targets, mended, frozenset(keep))
    birth.inputs, birth.outputs, birth.members = again.kept_inputs, again.kept_output, again.members
    return birth


def _play(program: Program, targets: Targets, mended: frozenset[Place], keep: frozenset[int] = frozenset(), hasty: bool = False) -> Mender:
    tracer = Mender({}, mended, keep)
    tracer.suspects = frozenset() if hasty else None
    with program.still(), module_names(program.roots, tracer), tracer:
        with tracer.blind(), torch._C.DisableTorchFunction():
            tracer.roles = roles_of(program)
        run = program.play(tracer)
        tracer.settle(run, _ends(program, targets, run))
    return tracer


def _ends(program: Program, targets: Targets, run: Run) -> list[torch.Tensor]:
    """The step is judged by its losses and gradients, whatever the symptom was."""
    if run.error is not None:
        return run.losses
    return [*run.losses, *targets(run), *(p.grad for p in program.leaves if p.grad is not None)]


class Mender(Tracer):
    """A tracer that makes the results of chosen operations finite as they are born."""

    def __init__(self, roles: dict[int, tuple[str, str]], mended: frozenset[Place], keep: frozenset[int]) -> None:
        super().__init__(roles, keep)
        self.light = False  # a mended step has another graph: it is recorded again beside the values that are kept
        self.mended = mended
        self.starts: list[int] = []
        self.losses: list[float] = []
        self.error: BaseException | None = None
        self._views = {-1 - number for entry, number in mended if entry == -1}  # a mended leaf and what only looks at it

    def settle(self, run: Run, ends: list[torch.Tensor]) -> None:
        """Look at how the step ended."""
        with self.blind():
            self.starts = list(dict.fromkeys(self.maker_of(t) for t in ends if damage_of(t.detach())))
            self.losses, self.error = scalars(run), run.error

    def _before(self, func: Any, args: Any, kwargs: dict[str, Any], number: int) -> Op:
        op = super()._before(func, args, kwargs, number)
        if op.index in self.keep:
            with torch._C.DisableTorchFunction():
                self._keep_inputs(op.index, func, args, kwargs)
        return op

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if self._views and not self._blind and name not in HAND_ON and not name.endswith("_"):
            with torch._C.DisableTorchFunction():
                args = tuple(self._repaired(a) for a in args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _repaired(self, value: Any) -> Any:
        """Return a finite copy of a mended leaf, or of a part of it; anything else as it is."""
        if isinstance(value, list | tuple):
            return type(value)([self._repaired(v) for v in value])
        known = self._writers.get(storage_key(value)) if isinstance(value, torch.Tensor) else None
        if known is None or known[1] not in self._views or not damage_of(value):
            return value
        copy = value.detach().clone()
        mend(copy)
        self._writers[storage_key(copy)] = (copy, known[1])
        return copy

    def _made(self, op: Op, args: Any, result: Any) -> None:
        outputs = [t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, torch.Tensor)]
        if self.suspects is not None:  # nothing is known of the sources
            if self._chosen(op) and not any(map(damage_of, tensors_of(args))):
                self._mend(op, outputs)
            return
        bad = [s for s in op.sources if s.colour is Colour.DAMAGE]
        if bad and all(s.maker in self._views for s in bad):
            self._views.add(op.index)
        elif not bad and self._chosen(op):
            self._mend(op, outputs)
        if op.index in self.keep and outputs:
            self._keep_output(op.index, outputs)

    def _mend(self, op: Op, outputs: list[torch.Tensor]) -> None:
        for tensor in outputs:
            with self._changing(tensor):
                mend(tensor, op.backward)

    def _chosen(self, op: Op) -> bool:
        made = self.graph.node_maker.get(op.node) if op.backward and not op.live else None
        born = op if made is None else self.graph.ops[made]
        return (born.entry, born.index - self.first.get(born.entry, 0)) in self.mended


class Arbitrary(ReplayMode):
    """Puts arbitrary finite numbers in the place of bad values in the backward pass.

    Whatever has a gradient of 0 then as well has one whatever the bad values should have been: a weight before a layer of zeros.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.source = torch.Generator().manual_seed(0)  # its own: the step draws what it drew

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch._C._current_autograd_node() is not None:
            with torch._C.DisableTorchFunction():
                given = {storage_key(t) for t in tensors_of((args, kwargs or {}))}
                for tensor in tensors_of(result):
                    if storage_key(tensor) not in given:  # a view of what the forward pass kept, or of a weight
                        self._fill(tensor)
        return result

    def _fill(self, tensor: torch.Tensor) -> None:
        dense = plain(tensor.detach())
        if dense is not None and damage_of(dense):
            bad = ~torch.isfinite(dense)
            dense[bad] = torch.rand(int(bad.sum()), generator=self.source).to(dense)


def mend(tensor: torch.Tensor, gradient: bool = False) -> None:
    """Put a usual value in place of each non-finite one: the median of the others, for a gradient 0.

    >>> x = torch.tensor([1.0, float("nan"), 3.0, 2.0])
    >>> mend(x); x
    tensor([1., 2., 3., 2.])
    """
    dense = plain(tensor.detach())
    if dense is None or not damage_of(dense):
        return
    bad = ~torch.isfinite(dense)
    good = dense[~bad]
    usual = good.median() if good.numel() and not gradient and not dense.is_complex() else torch.full((), 0.0 if gradient else 1.0)
    dense[bad] = usual.to(dense.dtype)
