"""Which samples of which data set a batch holds: noted when a loader hands it out, looked up when a row of it is at fault."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from whynan.capsule.sites import is_internal
from whynan.capsule.tape.facts import memory_of
from whynan.capsule.tape.nested import tensors_of
from whynan.records import number

KEPT = 64  # batches remembered: more than the micro-batches of most steps
_UNNAMED = "field "  # and its place in the batch
_MOST = 4096  # values of a batch that are kept
_SHOWN = 40  # characters of a text


@dataclass(frozen=True, slots=True)
class Drawn:
    """One batch: where it came from, and the fields that hold one value per sample."""

    dataset: str
    batch: int  # its number in this pass over the data, from 0
    indices: tuple[int, ...]  # of its samples; empty where the data set has no order
    fields: tuple[tuple[str, Any], ...]
    memory: tuple[Any, ...]  # weak references: they keep the numbers of freed memory from reuse, and nothing else
    iterator: weakref.ref[Any]  # of its loader

    @property
    def data_set(self) -> Any:
        """It, as long as its loader is in use."""
        return getattr(self.iterator(), "_dataset", None)

    def fetch(self, row: int) -> Any:
        """Ask the data set for a sample again."""
        return self.data_set[self.indices[row]] if self.data_set is not None and row < len(self.indices) else None

    def gather(self) -> Any:
        """Make the whole batch again, where the program has a function for that of its own."""
        iterator = self.iterator()
        if iterator is None or not self.indices or is_internal(getattr(iterator._collate_fn, "__code__", _OURS)):
            return None
        return iterator._collate_fn([self.data_set[i] for i in self.indices])

    def sample(self, row: int) -> str:
        """Say which sample a row is: its number in the data set, and its own small values; a number without a name says nothing."""
        place = f"number {self.indices[row]} of {self.dataset}" if row < len(self.indices) else f"from {self.dataset}"
        held = [(name, column[row]) for name, column in self.fields if row < len(column)]
        values = [f"{name} {_shown(value)}" for name, value in held if isinstance(value, str) or not name.startswith(_UNNAMED)]
        return f"sample {row} is {place}, in batch {self.batch} of this pass" + (f": {', '.join(values[:6])}" if values else "")


class Draws:
    """The last batches that were handed out."""

    def __init__(self) -> None:
        self._last: deque[Drawn] = deque(maxlen=KEPT)
        self._asked: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()  # iterator: indices by the number of the task

    def asked(self, iterator: Any, indices: Any) -> None:
        """A loader's iterator asks its data set for these samples."""
        tasks = self._asked.setdefault(iterator, {})
        tasks[getattr(iterator, "_send_idx", iterator._num_yielded)] = indices
        if len(tasks) > KEPT:  # a batch that could not be made is never handed out
            del tasks[next(iter(tasks))]

    def answered(self, iterator: Any) -> Any:
        """Return the indices of the batch that leaves its loader now; None where they are not known."""
        task = getattr(iterator, "_rcvd_idx", iterator._num_yielded) - 1
        indices = self._asked.get(iterator, {}).pop(task, None)
        return indices if getattr(iterator, "_in_order", True) else None

    def handed_out(self, iterator: Any, indices: Any, batch: Any) -> None:
        """A batch leaves its loader.

        Cost: a few microseconds per tensor of the batch, and a copy of the small ones.
        """
        name = type(getattr(iterator, "_dataset", None)).__name__
        memory = tuple(ref for tensor in tensors_of(batch) if (ref := _reference(tensor)) is not None)
        self._last.append(Drawn(name, iterator._num_yielded - 1, _numbers(indices), tuple(_fields(batch)), memory, weakref.ref(iterator)))

    def behind(self, tensors: Iterable[torch.Tensor]) -> Drawn | None:
        """Return the newest batch that these tensors came from."""
        places = {memory_of(t) for t in tensors}
        return next((drawn for drawn in reversed(self._last) if any(ref.cdata in places for ref in drawn.memory)), None)


_OURS = Drawn.sample.__code__  # for what is no function


def _reference(tensor: torch.Tensor) -> Any:
    try:
        return StorageWeakRef(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):  # it has no memory of its own
        return None


def _numbers(indices: Any) -> tuple[int, ...]:
    found = indices if isinstance(indices, list | tuple) else [indices]
    return tuple(int(i) for i in found) if all(isinstance(i, int) for i in found) else ()


def _fields(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield what has one plain value per sample: labels, lengths, texts, file names; copies, so that a batch can be freed."""
    items = batch.items() if isinstance(batch, dict) else enumerate(batch) if isinstance(batch, tuple | list) else ()
    room = _MOST
    for name, column in items:
        title = name if isinstance(name, str) else f"{_UNNAMED}{name}"
        kept = _kept(column, room)
        if kept is not None:
            room -= len(kept)
            yield title, kept


def _kept(column: Any, room: int) -> Any:
    if type(column) is torch.Tensor:
        small = column.is_cpu and column.layout is torch.strided and column.dim() == 1 and column.numel() <= room
        return column.detach().clone() if small else None
    plain = isinstance(column, list | tuple) and 0 < len(column) <= room and all(isinstance(v, str | int | float) for v in column)
    return tuple(v[: _SHOWN + 1] if isinstance(v, str) else v for v in column) if plain else None


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[: _SHOWN - 1] + "…")
    return number(float(value)) if not isinstance(value, bool) else str(value)
