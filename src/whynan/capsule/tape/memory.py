"""Tensors from outside the tape, by the memory they live in: what they hold is kept before it is written to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.parameter import UninitializedTensorMixin as _Lazy  # type: ignore[attr-defined]

from whynan.capsule.tape.entries import Outside
from whynan.capsule.tape.facts import is_leaf, memory_of

if TYPE_CHECKING:
    from whynan.capsule.tape.tape import Tape

READ_LIMIT = 64 << 20  # bytes of an outside tensor copied because the tape has read it and it is about to change
WRITE_LIMIT = 1 << 20  # the same for one that was not read before: a moving average, a counter


class Memory:
    """Knows the outside tensors of a tape.

    Cost: nothing until something is written; then a copy of what was read of it, once a step.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._known: dict[int, list[Outside]] = {}  # storage: the outside tensors that live in it
        self.unfiled: list[Outside] = []  # not among these yet: they are asked for only when something is written

    def _living_in(self, memory: int) -> list[Outside]:
        for outside in self.unfiled:
            self._known.setdefault(memory_of(outside.tensor), []).append(outside)
        self.unfiled.clear()
        return self._known.get(memory, [])

    def about_to_change(self, tensor: torch.Tensor) -> None:
        """Keep the values of outside tensors whose memory is about to be written, if they were read or are small."""
        if isinstance(tensor, _Lazy) or tensor.is_inference():
            return
        known = self._living_in(memory_of(tensor))
        for outside in known:
            if not outside.written:
                outside.written, outside.writer = True, self._tape.last
            if outside.saved is None and not outside.changed and _size(outside.tensor) <= READ_LIMIT:
                outside.saved = _copy(outside.tensor)
        if not known and self._tape.slot_of(tensor) is None and _size(tensor) <= WRITE_LIMIT:
            outside = self._tape.refer(tensor)  # type: ignore[assignment]
            if isinstance(outside, Outside):
                outside.saved, outside.written, outside.writer = _copy(tensor), True, self._tape.last

    def living_in(self, tensor: torch.Tensor) -> list[Outside]:
        """Return the outside tensors of this step that share a tensor's memory."""
        return list(self._living_in(memory_of(tensor)))

    def written(self, since: int) -> list[Outside]:
        """Return the outside tensors that were written to since an entry, each as it was before that."""
        first: dict[int, Outside] = {}
        for outsides in self._known.values():
            for outside in outsides:
                if outside.written and outside.writer > since:
                    first.setdefault(id(outside.tensor), outside)
        return list(first.values())

    def clear(self) -> None:
        """Forget all of them."""
        self._known.clear()
        self.unfiled.clear()


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad and is_leaf(tensor))
