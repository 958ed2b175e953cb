"""A healthy step or two, kept for the day one fails: a remedy must leave their loss as it was.

What is kept are the entries of a tape: the batch and small things, by reference; nothing that a replay makes again.
Cost: a copy of a small dictionary every 16 steps, and the memory of at most two batches of up to 64 MB.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from whynan.capsule.tape.entries import Entry, Outside, dependencies
from whynan.capsule.tape.facts import bytes_of, is_leaf, node_of
from whynan.capsule.tape.needs import needed_for
from whynan.capsule.tape.tape import Tape

FIRST = 8  # steps that are all kept, each in the place of an older one
EVERY = 16
LIMIT = 64 << 20  # bytes of what one kept step holds


@dataclass(frozen=True, slots=True)
class Kept:
    """One step that was applied."""

    step: int
    entries: list[Entry]


class Earlier:
    """The last healthy steps that were kept."""

    def __init__(self) -> None:
        self._kept: deque[Kept] = deque(maxlen=2)
        self.due = 0  # the step to keep next

    def keep(self, step: int, tape: Tape, function: Entry | None) -> None:
        """Keep the step that just ended, where it is small and stands on its own."""
        self.due = step + 1 if step < FIRST else step + EVERY
        entries = _of_step(dict(tape.entries), function, tape.rolled)
        if any(e.kind == "backward" or e is function for e in entries) and _light(entries):
            self._kept.append(Kept(step, entries))

    def before(self, step: int) -> list[Kept]:
        """Return the kept steps before this one, the newest first."""
        return [kept for kept in reversed(self._kept) if kept.step < step]

    def clear(self) -> None:
        """Forget them: another model is about to be trained."""
        self._kept.clear()


def _of_step(entries: dict[int, Entry], function: Entry | None, since: int) -> list[Entry]:
    if function is not None:
        return [*needed_for(entries, set(dependencies(function)), since), function]
    return needed_for(entries, {n for n, e in entries.items() if e.kind in ("backward", "zero")}, since)


def _light(entries: list[Entry]) -> bool:
    """Whether entries hold no autograd graph and little memory."""
    read = {id(leaf.tensor): leaf.tensor for e in entries for leaf in e.reads if isinstance(leaf, Outside)}
    loose = [t for t in read.values() if not (t.requires_grad and is_leaf(t))]
    return all(node_of(t) is None for t in loose) and sum(bytes_of(t) for t in loose) <= LIMIT
