"""The last good state of a run, kept in memory, to go back to.

Taken between two steps: after everything that follows an update (scheduler, averages, scaler) and before the next batch
is drawn. Cost: one copy of weights, buffers and optimizer state, in memory and in time, at every snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from whynan.capsule.snapshot import Snapshot, copied, local, nbytes
from whynan.capsule.state import own_modules, put_back, put_rng, take_rng
from whynan.recovery.followers import Moved
from whynan.tripwire.checks import nonfinite, optimizer_state


@dataclass(slots=True)
class Everything:
    """The live objects that make up the state of a run."""

    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)  # models and averaged copies
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    loaders: list[Any] = field(default_factory=list)

    def damaged(self) -> bool:
        """Whether anything of it is not finite already."""
        for module in self.modules:
            if nonfinite((*module.named_parameters(), *_statistics(module))):
                return True
        return any(nonfinite(optimizer_state(o)) for o in self.optimizers)


def _statistics(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Buffers that a norm layer fills; others may hold deliberate infinities."""
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._NormBase):
            yield from ((f"{name}.{n}", b) for n, b in part.named_buffers(recurse=False))


class LastGood:
    """One snapshot of everything, on the device or on the host."""

    def __init__(self, state: Everything, applied: int, on_host: bool, ahead: set[int] | None = None) -> None:
        self.applied = applied  # updates made so far
        self.since = 0  # optimizer steps begun since
        self.bad = ahead or set()  # which of them were dropped, or will be: their batches come again if the data is rewound
        self.restored = False
        self._optimizers = [Snapshot(o, on_host) for o in state.optimizers]
        known = {id(p) for s in self._optimizers for p, _ in s.parameters}
        tensors = {id(t): t for m in state.modules for t in (*m.parameters(), *m.buffers()) if id(t) not in known}
        self._tensors = [(t, copied(t, on_host)) for t in tensors.values()]
        modules = dict.fromkeys(m for root in state.modules for m in own_modules(root))
        self._attributes = [(m, m.__dict__.copy(), dict(m._buffers)) for m in modules]  # a forward pass may bind a buffer anew
        self._groups = [Moved(o) for o in (*state.schedulers, *state.optimizers)]
        self._scalers = [(s, s.state_dict()) for s in state.scalers]
        self._loaders = [(loader, loader.state_dict()) for loader in state.loaders]
        self._rng = take_rng(everything=True)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return sum(s.nbytes for s in self._optimizers) + nbytes([c for _, c in self._tensors])

    def restore(self, rewind_data: bool) -> list[tuple[Any, Any]]:
        """Put everything back in place; return the loaders with the position they were at, if they are to be rewound."""
        for snapshot in self._optimizers:
            snapshot.restore()
        for module, attributes, buffers in self._attributes:
            put_back(module, attributes)
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, copy in self._tensors:
                local(tensor).copy_(copy)
        for moved in self._groups:
            moved.restore()
        for scaler, saved in self._scalers:
            scaler.load_state_dict(saved)
        put_rng(self._rng)
        self.bad.add(self.since)
        self.since = 0
        self.restored = True
        return self._loaders if rewind_data else []
