"""What the program itself looks at: a bad scalar is a loss that it turns away from, or a number it only logs.

A loss is gone back from, or the program leaves the step because of it. A perplexity, a PSNR, the exponential of the loss
is looked at beside a backward pass from something else: what never reaches loss, gradients or state is no incident.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch

from whynan.capsule.tape.entries import Slot
from whynan.capsule.tape.nested import tensors_of
from whynan.engine.session import Session
from whynan.records import Symptom
from whynan.tripwire.values import damage_of

Place = tuple[int, int]  # a code object and an instruction in it
_MOST = 1000  # places that are remembered
_COPIED = 4  # calls at most, from a loss to the number that is looked at: `loss.detach().float().cpu()`


class Probes:
    """Hears of every value that the program looks at, and knows the places of those that it only logs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.left: Callable[[], None] = lambda: None  # told when the program has left a bad step behind
        self._leaves = False  # it is known to do so
        self.seen: deque[tuple[int, Place]] = deque(maxlen=100)  # values that were looked at since the last backward pass
        self._logged: set[Place] = set()  # where such values were made, and no backward pass came from them
        self._trained: set[Place] = set()  # and where one did
        self._losses: set[Place] = set()  # of these, where it came from nothing beside it
        self._terms: dict[Place, int] = {}  # how many values of one place, each looked at, went into one backward pass, at most

    def probed(self, tensor: torch.Tensor, result: object) -> None:
        """The program looked at a value: if it is a bad scalar that requires grad, it is a loss, and so is what it was detached from where losses are made.

        On a device only a look that brings the number itself is heard of (`loss.item()`): to read another would be to wait.
        """
        session = self.session
        pending = session.window.symptom is not None
        known = type(result) is float
        if (pending and session.window.entry >= 0) or tensor.numel() != 1 or not (known or tensor.device.type == "cpu") or not session.optimizers:
            return
        detached, slot = not tensor.requires_grad, session.recorder.tape.slot_of(tensor)
        slot, loss = self._loss_of(slot) if detached else (slot, tensor)
        if slot is None or loss is None or slot.entry <= session.window_start:
            return
        place = self._place(slot.entry)
        damage = None if known and isfinite(result) else damage_of(loss.detach())  # type: ignore[arg-type]
        if not damage:
            self.seen.append((slot.entry, place))
            return
        if (detached and not self._is_of_a_step(slot.entry)) or self._is_beside(slot.entry) or (pending and not self._has_left(slot.entry)):
            return
        if pending:
            session.guarded(self.left)
        session.see(Symptom("loss", damage.kind, "loss"))
        session.window.entry = -slot.entry

    def _loss_of(self, slot: Slot | None) -> tuple[Slot | None, torch.Tensor | None]:
        """Return the scalar with a history that a value was made from by a few calls, as by `loss.detach().cpu()`, if that is all it was made from."""
        tape = self.session.recorder.tape
        for _ in range(_COPIED):
            entry = tape.entries.get(slot.entry) if slot is not None else None
            if entry is None or len(entry.reads) != 1 or not isinstance(read := entry.reads[0], Slot):
                break
            slot, made = read, tape.alive(read)
            if made is not None and made.requires_grad:
                return (slot, made) if made.numel() == 1 else (None, None)
        return None, None

    def goes_back(self, tensors: Any) -> bool:
        """A backward pass begins; return whether it shows that the program has turned away from the bad value it looked at."""
        seen = list(self.seen)
        self.seen.clear()
        bad = -self.session.window.entry
        if bad <= 0:
            self._count_terms(Counter(place for _, place in set(seen)))
        if bad <= 0 and all(place in self._logged or place in self._trained for _, place in seen):
            return False
        tape = self.session.recorder.tape
        ends = {slot.entry for t in tensors_of(tensors) if (slot := tape.slot_of(t)) is not None}
        needed = {e.number for e in tape.needed_for(ends)}
        losses = self._only_from(ends)
        for number, place in seen:
            known = self._trained if number in needed else self._logged
            if len(known) < _MOST:
                known.add(place)
                self._losses.update([place] if number in losses else [])
        if bad <= 0 or bad in needed:
            return False
        behind = tape.needed_for({bad})
        calls = {e.number for e in behind if e.runs_model}
        first = min((e.number for e in behind if e.needs_grad), default=bad)
        earlier = any(self.session.window_start < e.number < first and e.number in needed and e.needs_grad for e in tape)  # of a term from before it
        earlier = earlier or any(number < bad and number in needed for number, _ in seen)  # that was looked at, too
        first_of_several = not earlier and self._is_first_of_several(bad, set(seen), needed)
        # computed from the loss, or a term of it that was left out
        if any(e.number in ends for e in behind) or (calls and calls <= needed) or earlier or first_of_several:
            self.session.window.symptom, self.session.window.entry = None, 0
            return False
        return True

    def _count_terms(self, terms: Counter[Place]) -> None:
        for place, count in terms.items():
            if count > 1 and (place in self._terms or len(self._terms) < _MOST):
                self._terms[place] = max(count, self._terms.get(place, 0))

    def _is_first_of_several(self, bad: int, seen: set[tuple[int, Place]], needed: set[int]) -> bool:
        """Whether a bad value, with those terms of the loss that were made at its place after it, makes no more than one step has, and none was before it.

        A program that leaves the whole step has them all in the next one. Where no step is known, it would mostly have zeroed gradients since.
        """
        place = self._place(bad)
        alike = [number for number, where in seen if where == place]
        count = sum(number > bad and number in needed for number in alike)
        if any(number < bad for number in alike):
            return False  # these were thrown away with it
        if place in self._terms:
            return bool(count) and self.session.window.left + 1 + count <= self._terms[place]
        if count < 2 or any(e.kind == "zero" and e.number > bad for e in self.session.recorder.tape):
            return False
        self._count_terms(Counter({place: count + 1}))
        return True

    def _only_from(self, ends: set[int]) -> set[int]:
        """Return the entries that a backward pass came from, and those that alone they were made of: `loss / 4`, `scaler.scale(loss)`."""
        entries, found = self.session.recorder.tape.entries, set(ends)
        todo = list(ends)
        while todo:
            entry = entries.get(todo.pop())
            if entry is None or entry.runs_model:
                continue
            made = {read.entry for read in entry.reads if isinstance(read, Slot) and (maker := entries.get(read.entry)) is not None and maker.needs_grad}
            if len(made) == 1 and not made <= found:
                found |= made
                todo += made
        return found

    def _is_of_a_step(self, number: int) -> bool:
        """Whether a detached value is the loss of a step: made where losses are, and by a model that trains; a validation may use the same function."""
        calls = [e.fn for e in self.session.recorder.tape.needed_for({number}) if e.kind == "module"]
        evaluated = bool(calls) and not any(getattr(model, "training", True) for model in calls)
        return self._place(number) in self._losses and not evaluated

    def _is_beside(self, number: int) -> bool:
        """Whether a bad value is one that the program only logs, or was computed from a step that is over or was gone back from just now."""
        if self._place(number) in self._logged - self._trained:
            return True
        tape, start = self.session.recorder.tape, self.session.window_start
        needed = tape.needed_for({number})
        if any(e.needs_grad and e.number <= start for e in needed):
            return True
        passes = [e for e in tape if e.kind == "backward" and e.number > start]
        if not passes or any(e.runs_model and e.number > passes[-1].number for e in tape):
            return False
        gone = tape.needed_for({leaf.entry for e in passes for leaf in e.reads if isinstance(leaf, Slot)})
        return not {e.number for e in needed}.isdisjoint(e.number for e in gone)

    def _has_left(self, entry: int) -> bool:
        """Whether the program has left the step of a bad loss behind: a model was called again, and that not for the first time.

        A step may have two losses, each from a call of its own; one that goes back makes a new window.
        """
        window = self.session.window
        first = window.looked_at or -window.entry
        if not any(e.runs_model and first < e.number < entry for e in self.session.recorder.tape):
            return False
        window.looked_at = entry
        window.left += 1
        if window.left < self._terms.get(self._place(entry), 0):
            return False  # one more of the terms that a loss is made of
        self._leaves = self._leaves or window.left > 1
        return self._leaves

    def _place(self, number: int) -> Place:
        """Return where in the program a value was made."""
        entry = self.session.recorder.tape.entries.get(number)
        return (id(entry.site.code), entry.site.lasti) if entry is not None and entry.site is not None else (0, 0)
