"""How the program made what is not finite already when training begins: a table, a schedule, the weights of a loss.

What is made before the first optimizer is no step and is forgotten, but for this: it may be meant, and nothing comes of it,
or a step meets it much later, far from the line that made it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from whynan.capsule.tape import Entry, Made, Outside, Slot, Tape, bytes_of, needed_for
from whynan.tripwire.values import damage_of

LIMIT = 64 << 20  # bytes of what such values were made from


class Setup:
    """The calls behind values that are not finite, none as a rule; and for a while all of them."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.before: dict[int, Entry] = {}  # all calls before an optimizer was made, until its weights are known to be good
        self._made: dict[int, Made] = {}

    def end(self, tape: Tape) -> None:
        """An optimizer was made: keep what led to bad values that are still held. The rest is forgotten with `before`, when its weights were looked at.

        Cost: one look at each tensor that the setup made and still holds.
        """
        bad = [made for entry in tape if not entry.needs_grad for made in entry.refs if (tensor := made()) is not None and _is_bad(tensor)]
        kept = needed_for(tape.entries, {made.slot.entry for made in bad}) if bad else []
        if _size(kept) <= LIMIT:
            self.entries.update((e.number, e) for e in kept)
            self._made.update((id(made()), made) for made in bad)
        self.before = dict(tape.entries) if _size(tape) <= LIMIT else {}
        tape.clear()

    def maker(self, tensor: torch.Tensor) -> Slot | None:
        """Return the call that made a tensor, if it was kept."""
        made = self._made.get(id(tensor))
        return made.slot if made is not None and made() is tensor else None


def _size(entries: Iterable[Entry]) -> int:
    """Return how much memory the tensors and arrays take that some calls were given."""
    held: dict[int, int] = {}
    for entry in entries:
        held.update((id(leaf.tensor), bytes_of(leaf.tensor)) for leaf in entry.reads if isinstance(leaf, Outside))
        held.update((id(value), value.nbytes) for value in (*entry.args, *entry.kwargs.values()) if isinstance(getattr(value, "nbytes", None), int))
    return sum(held.values())


def _is_bad(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and not tensor.requires_grad and tensor.is_floating_point() and bool(damage_of(tensor))
