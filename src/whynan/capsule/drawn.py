"""Which samples of which data set a batch holds: noted when a loader hands it out, looked up when a row of it is at fault."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from whynan.capsule.tape import memory_of, tensors_of
from whynan.records import number

KEPT = 256  # batches remembered: more than the micro-batches of a step
_MOST = 4096  # samples of a batch whose own fields are kept
_SHOWN = 40  # characters of a text


@dataclass(frozen=True, slots=True)
class Drawn:
    """One batch: where it came from, and the fields that hold one value per sample."""

    dataset: str
    batch: int  # its number in this pass over the data, from 0
    indices: tuple[int, ...]  # of its samples; empty where the data set has no order
    fields: tuple[tuple[str, Any], ...]
    memory: frozenset[int]

    def sample(self, row: int) -> str:
        """Say which sample a row is: its number in the data set, and its own small values."""
        place = f"number {self.indices[row]} of {self.dataset}" if row < len(self.indices) else f"from {self.dataset}"
        values = [f"{name} {_shown(column[row])}" for name, column in self.fields if row < len(column)]
        return f"sample {row} is {place}, in batch {self.batch} of this pass" + (f": {', '.join(values[:6])}" if values else "")


class Draws:
    """The last batches that were handed out."""

    def __init__(self) -> None:
        self._last: deque[Drawn] = deque(maxlen=KEPT)
        self._asked: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()  # iterator: indices asked for, in order
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def asked(self, iterator: Any, indices: Any) -> None:
        """A loader's iterator asks its data set for these samples; workers answer in this order."""
        self._asked.setdefault(iterator, deque(maxlen=KEPT)).append(indices)

    def handed_out(self, iterator: Any, batch: Any) -> None:
        """A batch leaves its loader.

        Cost: a few microseconds per tensor of the batch; no value is read.
        """
        asked = self._asked.get(iterator)
        count = self._numbers[iterator] = self._numbers.get(iterator, -1) + 1
        indices = _numbers(asked.popleft()) if asked else ()
        name = type(getattr(iterator, "_dataset", None)).__name__
        self._last.append(Drawn(name, count, indices, tuple(_fields(batch)), frozenset(memory_of(t) for t in tensors_of(batch))))

    def behind(self, tensors: Iterable[torch.Tensor]) -> Drawn | None:
        """Return the newest batch that these tensors came from."""
        places = {memory_of(t) for t in tensors}
        return next((drawn for drawn in reversed(self._last) if drawn.memory & places), None)


def _numbers(indices: Any) -> tuple[int, ...]:
    found = indices if isinstance(indices, list | tuple) else [indices]
    return tuple(int(i) for i in found) if all(isinstance(i, int) for i in found) else ()


def _fields(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield what has one plain value per sample: labels, lengths, texts, file names."""
    items = batch.items() if isinstance(batch, dict) else enumerate(batch) if isinstance(batch, tuple | list) else ()
    for name, column in items:
        title = name if isinstance(name, str) else f"field {name}"
        if isinstance(column, torch.Tensor) and column.dim() == 1 and column.numel() <= _MOST:
            yield title, column
        elif isinstance(column, list | tuple) and column and len(column) <= _MOST and all(isinstance(v, str | int | float) for v in column):
            yield title, tuple(column)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[: _SHOWN - 1] + "…")
    return number(float(value)) if not isinstance(value, bool) else str(value)
