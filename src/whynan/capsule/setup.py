"""How the program made what a step is handed from before it: a table, a schedule, the weights of a loss; the advantages of a rollout.

What is made before the first optimizer is no step and is forgotten, but for what is not finite: it may be meant, and nothing comes of it,
or a step meets it much later, far from the line that made it. What a step computes without gradients and the program still holds when it
is over (targets that several updates are made from) is remembered as long as it is held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from whynan.capsule.tape.entries import Entry, Inner, Made, Outside, Slot, dependencies, target_of
from whynan.capsule.tape.facts import bytes_of
from whynan.capsule.tape.needs import needed_for
from whynan.capsule.tape.tape import Tape
from whynan.tripwire.values import damage_of

LIMIT = 64 << 20  # bytes of what such values were made from
_MOST = 1024  # calls of a step, and of all steps before it, that are remembered
_OFTEN = 16  # steps after which it is looked what of it is still held


class Setup:
    """The calls behind values that are not finite, none as a rule; and for a while all of them."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.before: dict[int, Entry] = {}  # all calls before an optimizer was made, until its weights are known to be good
        self._made: dict[int, Made] = {}
        self.held: dict[int, Entry] = {}  # calls of earlier steps, made without gradients, whose results the program holds
        self._due = _OFTEN
        self._bytes = 0

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

    def step_over(self, tape: Tape) -> None:
        """Remember the calls behind what the step that ends has computed without gradients, where the program still holds it.

        Cost: a look at each call of the step; one at each remembered call in every 16th.
        """
        fresh = {e.number: e for e in tape if not e.needs_grad and e.refs and e.number > tape.rolled and e.kind in ("call", "write", "module")}
        kept = self._behind(fresh, {n for n, entry in fresh.items() if _is_held(entry)}) if fresh and len(fresh) <= _MOST else []
        for entry in kept:
            to = target_of(entry) if entry.kind == "write" else None
            into_older = isinstance(to, Outside) or (isinstance(to, Slot) and to.entry <= tape.rolled)  # a table that every step writes to has no end
            if not into_older and all(n in self.held for n in dependencies(entry)):  # else something behind it was trained, or is forgotten
                self.held[entry.number] = entry
        if self.held:
            self._bytes += _size(kept)
            self._due -= 1
            if self._due <= 0 or self._bytes > LIMIT:
                self._forget()

    def _behind(self, fresh: dict[int, Entry], held: set[int]) -> list[Entry]:
        if any(entry.kind == "write" for entry in fresh.values()):
            return needed_for(fresh, held) if held else []
        for number in reversed(fresh):
            if number in held:
                held.update(dependencies(fresh[number]))
        return [entry for number, entry in fresh.items() if number in held]

    def _forget(self) -> None:
        keep = {n for n, entry in self.held.items() if _is_held(entry)}
        more = keep
        while more:  # what they were made from, and what was written into that
            for number in reversed(self.held):
                if number in keep:
                    keep.update(dependencies(self.held[number]))
            more = {n for n, e in self.held.items() if n not in keep and e.kind == "write" and getattr(target_of(e), "entry", 0) in keep}
            keep |= more
        self.held = {n: e for n, e in self.held.items() if n in keep}
        self._due, self._bytes = _OFTEN, _size(self.held.values())
        if len(self.held) > _MOST or self._bytes > LIMIT:
            self.held, self._bytes = {}, 0

    def behind(self, tensor: torch.Tensor, tape: Tape) -> Behind | None:
        """Return the calls that made a tensor, if they were kept."""
        made = self._made.get(id(tensor))
        if made is not None and made() is tensor:
            return Behind(made.slot, needed_for(self.entries, {made.slot.entry}), {}, "before the first step")
        slot = tape.made_by(tensor)
        if slot is None or slot.entry not in self.held:
            return None
        found = {ref.slot: t for entry in self.held.values() for ref in entry.refs if (t := ref()) is not None and tape.made_by(t) == ref.slot}
        given: dict[Slot | Inner, torch.Tensor] = {
            made: t for made, t in found.items() if made != slot and not damage_of(t.detach())
        }  # as they are: random numbers, what a model has said
        open_ = {n: e for n, e in self.held.items() if any(ref.slot not in given for ref in e.refs)}
        return Behind(slot, needed_for(open_, {slot.entry}), given, "in an earlier step")


class Behind(NamedTuple):
    """The calls behind a tensor, and which result of theirs it is."""

    slot: Slot
    entries: list[Entry]
    given: dict[Slot | Inner, torch.Tensor]  # results that the program holds and are finite: they are not made again
    when: str


def _is_held(entry: Entry) -> bool:
    return any(made() is not None for made in entry.refs)


def _size(entries: Iterable[Entry]) -> int:
    """Return how much memory the tensors and arrays take that some calls were given."""
    held: dict[int, int] = {}
    for entry in entries:
        held.update((id(leaf.tensor), bytes_of(leaf.tensor)) for leaf in entry.reads if isinstance(leaf, Outside))
        held.update((id(value), value.nbytes) for value in (*entry.args, *entry.kwargs.values()) if isinstance(getattr(value, "nbytes", None), int))
    return sum(held.values())


def _is_bad(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and not tensor.requires_grad and tensor.is_floating_point() and bool(damage_of(tensor))
