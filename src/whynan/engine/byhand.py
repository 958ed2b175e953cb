"""Writes to weights by the program itself: the updates of one without optimizers, and what a loop does between two backward passes of a step."""

from __future__ import annotations

import math
from typing import Any

import torch

from whynan.capsule.tape.entries import Entry, Slot
from whynan.capsule.tape.facts import is_leaf, memory_of
from whynan.capsule.tape.nested import tensors_of
from whynan.engine.acting import Acting
from whynan.engine.noticing import Noticing
from whynan.engine.session import Session, parameters_of, shape_of
from whynan.engine.trained import EVERY
from whynan.records import Symptom
from whynan.tripwire.checks import nonfinite, total_norm
from whynan.tripwire.values import damage_of, parts


class ByHand:
    """Looks at gradients where no optimizer asks for it."""

    def __init__(self, session: Session, noticing: Noticing, acting: Acting) -> None:
        self.session, self.noticing, self.acting = session, noticing, acting
        self._weights: tuple[int, frozenset[int]] = (-1, frozenset())  # as known at a step: the memory of what optimizers train
        self._looked = (-1, 0)  # the step, and its backward passes, whose gradients were looked at for the sake of a write

    def may_write(self, target: torch.Tensor, sources: Any) -> bool:
        """A loose in-place write. After a bad backward pass one to a weight is left out: it is the update, or would hide the cause."""
        session = self.session
        if session.budget.observes:
            return True
        dropped = session.recorder.tape.dropped
        if dropped is not None and dropped.leaves_out(target, sources):
            return False
        if dropped is not None and not session.budget.moved and not session.window.backwards:
            session.budget.moved = self._is_trained(target)
        if not session.by_hand:
            return not session.window.backwards or not self._is_trained(target) or not (session.window.told or self._is_bad() or self._breaks(target, sources))
        if not session.window.told:
            session.in_place = session.in_place or (session.window.backwards > 0 and self._weight_in(target) is not None)
            return True
        if (weight := self._weight_in(target)) is not None and session.trains(weight):
            return False  # whoever made it: `(0.1 * torch.randn(4)).requires_grad_()` is on the tape
        return not self._held_back(target, sources) if torch.is_grad_enabled() else session.recorder.tape.slot_of(target) is not None

    def _held_back(self, target: torch.Tensor, sources: Any) -> bool:
        """Keep the gradients of a bad step out of a moment that is updated with autograd on; what was done to it for their sake before is undone."""
        gradients = {memory_of(p.grad): p.grad.shape for p in self.session.leaves() if p.grad is not None}
        if memory_of(target) in gradients or target.shape not in gradients.values():
            return False
        tape, since = self.session.recorder.tape, self._last_backward()
        written = [o for o in tape.memory.written(since) if o.tensor is target]
        if tape.slot_of(target) is not None and not written:
            return False  # made in this step
        if not any(memory_of(t) in gradients or self._is_made_of_gradients(t, since) for t in tensors_of(sources) if t is not target):
            return False
        _put([(o.tensor, o.value()) for o in written if o.saved is not None])
        return True

    def _is_made_of_gradients(self, tensor: torch.Tensor, since: int) -> bool:
        """Whether a tensor is a gradient, or was computed from one since an entry."""
        tape, seen = self.session.recorder.tape, set[int]()
        todo: list[object] = [tape.slot_of(tensor)]
        while todo:
            slot = todo.pop()
            entry = tape.entries.get(slot.entry) if isinstance(slot, Slot) and slot.entry > since else None
            if entry is None or entry.number in seen:
                continue
            if entry.kind in ("grad", "derivative"):
                return True
            seen.add(entry.number)
            todo += entry.reads
        return False

    def written(self, target: torch.Tensor, entry: Entry) -> None:
        """A loose in-place write was made: if it is an update that broke a weight, take the update back, explain it, decide."""
        session, window = self.session, self.session.window
        if not session.by_hand or not window.backwards or window.told or not target.is_cpu:
            return
        weight = self._weight_in(target)
        if weight is None or not (damage := damage_of(weight.detach())) or not session.trains(weight):
            return
        held = session.recorder.tape.memory.written(self._last_backward())
        if any(o.saved is None for o in held):
            return  # too large to be kept: the next step tells of a weight that is bad
        if not any(o.tensor is weight and (weight.isfinite() < o.value().isfinite()).any() for o in held):
            return  # a weight that holds -inf on purpose
        after = [o.tensor.detach().clone() for o in held]
        _put([(o.tensor, o.value()) for o in held])
        session.see(Symptom("parameter", damage.kind, next(name for name, _ in session.names_of([weight]))))
        window.entry = -entry.number
        if self.acting.act(None) == "observed":
            _put([(o.tensor, value) for o, value in zip(held, after, strict=True)])

    def look_at_new_weights(self, handed: Any = ()) -> None:
        """A step ends in a program without optimizers: look at the weights it made in place of the old ones, while it is known how.

        Those of `torch.func` are plain tensors, `handed` to the next derivative.
        """
        session, window = self.session, self.session.window
        if window.told:
            return
        last = self._last_backward()
        tape = session.recorder.tape
        updated = [t for t in tensors_of(handed) if t.is_floating_point() and self._is_made_of_gradients(t, last - 1)]
        plain = [(slot, tensor) for tensor in updated if (slot := tape.slot_of(tensor)) is not None]
        for slot, weight in [*tape.made_leaves(), *plain]:
            if slot.entry > last and weight.is_cpu and (damage := damage_of(weight.detach())):
                session.see(Symptom("parameter", damage.kind, f"weight {shape_of(weight)}"))
                window.entry = -slot.entry
                self.acting.telling.report()
                return

    def _last_backward(self) -> int:
        return max((e.number for e in self.session.recorder.tape if e.kind in ("backward", "derivative")), default=0)

    def _weight_in(self, target: torch.Tensor) -> torch.Tensor | None:
        """Return the weight that a write goes to, be it through `.data`, in a program without optimizers."""
        if target.requires_grad and is_leaf(target):
            return target
        return next((o.tensor for o in self.session.recorder.tape.memory.living_in(target) if o.tensor.requires_grad and is_leaf(o.tensor)), None)

    def _is_trained(self, target: torch.Tensor) -> bool:
        """Whether a write goes to the memory of a weight, be it through `.data`."""
        session = self.session
        if self._weights[0] != session.step_count:
            trained = (p for optimizer in session.optimizers for p in parameters_of(optimizer))
            self._weights = session.step_count, frozenset(map(memory_of, trained))
        return memory_of(target) in self._weights[1]

    def _is_bad(self) -> bool:
        """Whether the step that a weight is written in is known to be bad: with a weight moved by its gradient (SAM) the cause could not be seen any more."""
        session, window = self.session, self.session.window
        if window.symptom is None and self._looked != (session.step_count, window.backwards):
            self._looked = session.step_count, window.backwards
            for optimizer in session.optimizers:
                if window.symptom is None and all(p.is_cpu for p in parameters_of(optimizer)):
                    self.noticing.look_at_gradients(optimizer)
        return window.symptom is not None and window.symptom.place in ("loss", "gradient")

    def _breaks(self, target: torch.Tensor, sources: Any) -> bool:
        """Whether a write between two backward passes would put something bad into a sound weight: that step is told, and what it writes is left out."""
        session, tape = self.session, self.session.recorder.tape
        given = [t for t in tensors_of(sources) if t is not target and t.is_cpu and (t.is_floating_point() or t.is_complex())]
        found = next(((slot, damage) for t in given if (damage := damage_of(t.detach())) and (slot := tape.slot_of(t)) is not None), None)
        if found is None or damage_of(target.detach()):
            return False
        place = memory_of(target)
        owner, weight = next((o, p) for o in session.optimizers for p in parameters_of(o) if memory_of(p) == place)
        session.see(Symptom("parameter", found[1].kind, next(name for name, _ in session.names_of([weight]))))
        session.window.entry = -found[0].entry
        return self.acting.act(owner) != "observed"

    def may_update(self) -> bool:
        """Whether an optimizer that is not torch's may make its update: not after a bad backward pass."""
        session = self.session
        session.in_place = True
        session.stop_again()
        return not session.window.told or session.budget.observes

    def check_gradients(self) -> None:
        """A backward pass is over: look at the gradients of everything they can end in."""
        leaves = [p for p in self.session.leaves() if p.grad is not None]
        self.session.trained.remember(leaves, self.session.step_count)
        self._settle([(f"gradient of {shape_of(p)}", p.grad) for p in leaves if p.grad is not None])

    def check_derivative(self, outputs: Any, result: Any) -> None:
        """`torch.autograd.grad` or `torch.func` gave gradients: look at them."""
        self.noticing.losses(outputs)
        self.session.window.backwards += 1
        self.noticing.check_loss(next(reversed(self.session.recorder.tape.entries.values()), None))
        if self.session.step_count % EVERY < 2:
            self.session.trained.remember(self.session.leaves(), self.session.step_count)
        self._settle([("gradient", t) for t in tensors_of(result)])

    def _settle(self, made: list[tuple[str, torch.Tensor]]) -> None:
        """Look at the gradients that a pass has made: at their norm, and at each where that is not finite."""
        session = self.session
        norm = total_norm([part for _, gradient in made for part in parts(gradient.detach())])
        session.window.norm = None if norm is None else float(norm)
        if session.window.norm is not None and not math.isfinite(session.window.norm) and (bad := nonfinite(made)) and session.window.symptom is None:
            session.see(Symptom("gradient", bad[0][2].kind, bad[0][0]))
        if session.window.symptom is not None and not session.window.told:
            self.acting.act(None)
        else:
            self.session.write_metrics(None)


def _put(values: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)
