"""Which entries have to be made again so that some others can be."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from whynan.capsule.tape.entries import Entry, Inner, Outside, Slot, dependencies, target_of
from whynan.capsule.tape.facts import is_leaf


def needed_for(entries: dict[int, Entry], numbers: set[int], since: int = 0) -> list[Entry]:
    """Return the entries these entries depend on, and themselves, in order; `since` an entry is where the step began."""
    keep = set(numbers)
    backward = {n for n, e in entries.items() if e.kind in ("backward", "zero")}
    weights: set[int] = set()  # and buffers, of the modules that are called, and those that calls read
    turn = first_backward(entries.values())
    overwritten = any(overwrites(e, turn) for e in entries.values())
    for number in reversed(entries):
        entry = entries[number]
        if (target := overwrites(entry, turn)) is not None and id(target.tensor) in weights:
            keep.add(number)
        if overwritten and number in keep:
            weights.update(map(id, held_by(entry.fn)) if isinstance(entry.fn, torch.nn.Module) else read_weights(entry))
        made_here = entry.kind == "write" and isinstance(target_of(entry), Slot | Inner)
        if made_here and since < number < max(numbers, default=0):
            keep.add(number)  # a write to a tensor made on the tape may be seen through any of its views
        if number in keep:
            keep.update(dependencies(entry))
            if entry.kind == "grad":
                keep.update(n for n in backward if n < number)
    return [e for n, e in entries.items() if n in keep]


def overwrites(entry: Entry, turn: int) -> Outside | None:
    """Return the tensor from outside that an entry writes to, if that is no update of what the step trains.

    A teacher's weight, read by its module, or one that is initialised from what the step computes, before the way back begins at `turn`.
    """
    target = target_of(entry) if entry.kind == "write" else None
    if not isinstance(target, Outside):
        return None
    with torch._C.DisableTorchFunction():  # to ask for a gradient is a call that would be recorded
        replaced = entry.number < turn and getattr(entry.fn, "__name__", "") == "__set__"  # `weight.data = …`: nothing of what it was is left
        return target if is_leaf(target.tensor) and (target.tensor.grad is None or replaced) else None


def first_backward(entries: Iterable[Entry]) -> int:
    """Return the number of the first backward pass; 0 where there is none."""
    return min((e.number for e in entries if e.kind == "backward"), default=0)


def held_by(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a module reads wherever it is called: parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def read_weights(entry: Entry) -> list[int]:
    """Return the numbers of the leaves from outside that a call reads and that gradients end in."""
    return [id(leaf.tensor) for leaf in entry.reads if isinstance(leaf, Outside) and leaf.tensor.requires_grad]
