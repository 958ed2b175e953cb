"""The last good state of a run, kept in memory, to go back to.

Taken between two steps: after everything that follows an update (scheduler, averages, scaler) and before the next batch
is drawn. Cost: one copy of weights, buffers and optimizer state, in memory and in time, at every snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from whynan.capsule.doors.loaders import Loop
from whynan.capsule.snapshot import Snapshot, copied, local, nbytes
from whynan.capsule.state.holdings import Mutable, holdings, own_modules, put_back
from whynan.capsule.state.randomness import put_rng, take_rng
from whynan.capsule.state.surroundings import Spot, arrays_in, put, taken
from whynan.capsule.tape.facts import is_memory
from whynan.recovery.followers import Moved
from whynan.tripwire.checks import nonfinite, optimizer_state

Buffer = tuple[int, str]  # the module it belongs to, its name


@dataclass(slots=True)
class Everything:
    """The live objects that make up the state of a run."""

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)  # models and averaged copies
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)  # over loaders that know their position

    def damaged(self, before: LastGood | None) -> bool:
        """Whether anything of it is not finite already."""
        if any(nonfinite(module.named_parameters()) for module in self.modules) or any(nonfinite(optimizer_state(o)) for o in self.optimizers):
            return True
        if any(s._scale is not None and not bool(s._scale.isfinite()) for s in self.scalers):
            return True
        return any(
            before is not None or isinstance(part, _NormBase) for key, part in _bad_buffers(self.modules) if before is None or key not in before.bad_buffers
        )


def _bad_buffers(modules: list[torch.nn.Module]) -> Iterator[tuple[Buffer, torch.nn.Module]]:
    """Yield the buffers that are not finite. Those that were so from the beginning may be deliberate (masks of -inf)."""
    for module in modules:
        for part in module.modules():
            yield from (((id(part), name), part) for name, _, _ in nonfinite((n, b) for n, b in part._buffers.items() if b is not None))


@dataclass(frozen=True, slots=True)
class Position:
    """Where a loader was."""

    loader: Any
    state: Any
    playing: int  # in which loop over it
    drawn: torch.Tensor | None  # the state of its generator


def _position(loop: Loop) -> Position:
    loader = loop.loader
    state = loader.state_dict()  # before its generator: some samplers ask that for what they keep
    return Position(loader, state, loop.playing, None if loader.generator is None else loader.generator.get_state())


class LastGood:
    """One snapshot of everything, on the device or on the host."""

    def __init__(self, state: Everything, applied: int, on_host: bool, ahead: set[int] | None = None) -> None:
        self.applied = applied  # updates made so far
        self.since = 0  # optimizer steps begun since
        self.bad = ahead or set()  # which of them were dropped, or will be: their batches come again if the data is rewound
        self.restored = False
        self._on_host = on_host
        self._optimizers = [Snapshot(o, on_host) for o in state.optimizers]
        self._known = {id(p) for s in self._optimizers for p, _ in s.parameters}
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._attributes: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._held: list[Mutable] = []  # lists, dicts and plain tensors kept on modules
        self._arrays: list[tuple[Spot, Any]] = []
        self._groups: list[Moved] = []
        self._scalers: list[tuple[Any, Any]] = []
        self.bad_buffers = {key for key, _ in _bad_buffers(state.modules)}
        for thing in (*state.modules, *state.schedulers, *state.optimizers, *state.scalers):
            self.add(thing)
        self._positions: list[Position] = []
        for loop in state.loops:
            self.add(loop)
        self._rng = take_rng(others=True)

    def add(self, thing: Any) -> None:
        """Take in a module, scheduler, optimizer, scaler or loader that is met for the first time: it has not moved since the snapshot."""
        if isinstance(thing, Loop):
            if all(known.loader is not thing.loader for known in self._positions):
                self._positions.append(_position(thing))
            return
        if id(thing) in self._known:
            return
        self._known.add(id(thing))
        if isinstance(thing, torch.nn.Module):
            tensors = {id(t): t for t in (*thing.parameters(), *thing.buffers()) if id(t) not in self._known}
            self._known.update(tensors)
            self._tensors += [(t, copied(t, self._on_host)) for t in tensors.values() if is_memory(local(t))]
            self._arrays += taken(a for m in own_modules(thing) for a in arrays_in(m.__dict__))
            self._held += [Mutable(v) for m in own_modules(thing) for v in holdings(m.__dict__)]
            self._attributes += [(m, m.__dict__.copy(), dict(m._buffers)) for m in own_modules(thing)]  # a forward pass may bind a buffer anew
        elif isinstance(thing, torch.amp.GradScaler):
            self._scalers.append((thing, thing.state_dict()))
        else:
            self._groups.append(Moved(thing))

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return sum(s.nbytes for s in self._optimizers) + nbytes([c for _, c in self._tensors])

    def restore(self, rewind_data: bool, bad: int) -> list[Position]:
        """Put everything back in place for a bad step, by its number since; return where the loaders were, if they are to be rewound."""
        for snapshot in self._optimizers:
            snapshot.restore()
        for module, attributes, buffers in self._attributes:
            put_back(module, attributes)
            module._buffers.update(buffers)
        for item in self._held:
            item.restore()
        put(self._arrays)
        with torch.no_grad():
            for tensor, copy in self._tensors:
                local(tensor).copy_(copy)
        for moved in self._groups:
            moved.restore()
        for scaler, saved in self._scalers:
            scaler.load_state_dict(saved)
        put_rng(self._rng)
        self.bad.add(bad)
        self.since = 0
        self.restored = True
        return self._positions if rewind_data else []
