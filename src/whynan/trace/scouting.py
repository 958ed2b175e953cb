"""On a GPU, find out first which operations of a step may have given non-finite values: one read for the whole step.

To look at each result as it is made means to wait for the device thousands of times. A scout lets the step run through
and keeps one number per result on the device; the tracer that follows looks only where that number was infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode

from whynan.capsule.replay import Program
from whynan.trace.memory import is_whole, storage_key
from whynan.trace.modes import ReplayMode
from whynan.tripwire.values import largest_of, plain


@dataclass(frozen=True, slots=True)
class Scouted:
    """What a scout brought back: how many operations there were, which of them are to be looked at, and which surely gave NaN."""

    count: int
    suspects: frozenset[int]
    nan: frozenset[int]
    clean: frozenset[int]  # memory of weights that are finite


def scout(program: Program) -> Scouted | None:
    """Play a step once and return where to look; None where looking at once is as good.

    Cost: one replay, one reduction per result, one host sync.
    """
    if not waits(program) or any(entry.kind == "function" for entry in program.entries):  # a step function is played as seldom as can be
        return None
    watcher = _Scout()
    with program.still(), watcher, BaseTorchFunctionMode():  # a function mode turns some fast ways off, and the tracer has one
        program.play()
        watcher.blind = True
        return watcher.report(_finite_memory(program.leaves))


def waits(program: Program) -> bool:
    """Whether to look at a value of this program means to wait for a device."""
    return any(leaf.is_cuda for leaf in program.leaves)


def _finite_memory(weights: list[torch.Tensor]) -> frozenset[int]:
    """Return the memory of those weights that are finite and have it for themselves."""
    whole = [w.detach() for w in weights if is_whole(w)]
    sizes = largest_of(whole)
    return frozenset(storage_key(w) for w, size in zip(whole, sizes, strict=True) if size is not None and math.isfinite(size))


class _Scout(ReplayMode):
    """Keeps the largest magnitude of each result, unread. What only looks at memory that was measured is not measured again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.blind = False
        self.sizes: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
        self.unclear: set[int] = set()
        self.owners: dict[int, int] = {}  # memory: the operation whose result in it was measured last
        self.views: list[tuple[int, int, bool]] = []  # an operation, the one that its result is a view of, and whether of all of it
        self.single: set[int] = set()  # operations with one result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.blind:
            with torch._C.DisableTorchFunction():  # our own looking is not the user's calling
                self._see(func, result)
        return result

    def _see(self, func: Any, result: Any) -> None:
        index, self.count = self.count, self.count + 1
        is_view = getattr(func, "is_view", False)
        if result is None:
            self.unclear.add(index)  # written in place
        elif isinstance(result, torch.Tensor):
            self.single.add(index)
        for tensor in result if isinstance(result, list | tuple) else (result,):
            if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
                self._look(index, tensor, is_view)

    def _look(self, index: int, tensor: torch.Tensor, is_view: bool) -> None:
        if plain(tensor) is not tensor or tensor.is_complex() or tensor.element_size() == 1 or tensor.device.type == "meta":
            self.unclear.add(index)
            return
        memory = storage_key(tensor)
        owner = self.owners.get(memory) if is_view else None
        if owner is not None:
            self.views.append((index, owner, is_whole(tensor)))
            return
        self.owners[memory] = index
        size = torch.linalg.vector_norm(tensor, torch.inf)  # below autograd: nothing of it is recorded
        self.sizes.setdefault((size.dtype, size.device), []).append((index, size))

    def report(self, clean: frozenset[int]) -> Scouted:
        """Read all sizes at once."""
        found = set(self.unclear)
        nan: set[int] = set()
        for group in self.sizes.values():
            for (index, _), size in zip(group, torch.stack([size for _, size in group]).tolist(), strict=True):
                if not math.isfinite(size):
                    (nan if math.isnan(size) else found).add(index)
        for index, owner, whole in self.views:
            if owner in nan or owner in found:
                (nan if whole and owner in nan and owner in self.single else found).add(index)
        return Scouted(self.count, frozenset(found), frozenset(nan - found), clean)
