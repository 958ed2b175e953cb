"""Look at what a step made before it is applied: loss, gradients, buffers, and state that is new."""

from __future__ import annotations

import math
import weakref
from itertools import takewhile
from typing import Any

import torch

from whynan.capsule.state.prints import marks_of_gradients
from whynan.capsule.tape.arguments import leaves
from whynan.capsule.tape.entries import Entry, Outside, Slot, target_of
from whynan.capsule.tape.facts import memory_of
from whynan.capsule.tape.nested import tensors_of
from whynan.engine.markers import Markers
from whynan.engine.meant import Meant
from whynan.engine.session import Session, parameters_of, symptom_of
from whynan.records import Symptom
from whynan.tripwire.checks import flat_ones, nonfinite, norm_of_gradients, scalar_damage, surely_finite, worse
from whynan.tripwire.values import Damage, damage_of

Found = tuple[str, torch.Tensor, Damage]
_Tensor, _isfinite = torch.Tensor, math.isfinite  # looked up once: asked at every step


class Noticing:
    """Asks the cheap questions at every step; an answer becomes the window's symptom."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.markers, self.meant = Markers(session), Meant(session)
        self._flat: dict[int, list[bool]] = {}  # by optimizer, see `flat_ones`
        self.unchecked: list[weakref.ref[Any]] = []  # state that was made or loaded and not looked at yet

    def made_or_loaded(self, owner: Any) -> None:
        """Look at this before the next step."""
        self.unchecked = [ref for ref in self.unchecked if ref() is not None and ref() is not owner] + [weakref.ref(owner)]

    def losses(self, tensors: Any) -> None:
        """Note what the program goes back from."""
        if type(tensors) is _Tensor:
            self.session.window.losses.append(tensors.detach())
        else:
            self.session.window.losses += [t.detach() for t in tensors_of(tensors)]

    def check_loss(self, entry: Entry | None, wait: bool = False) -> None:
        """Look at the newest loss; on another device only if told to wait for it."""
        window = self.session.window
        loss = window.losses[-1] if window.losses else None
        if loss is None or not (loss.is_cpu or wait):
            return  # looked at on the device, later
        try:
            value = loss.item()
        except RuntimeError:  # several values
            value = None
        if value is not None and type(value) is not complex:
            window.loss = float(value)
            if _isfinite(window.loss):
                return
            damage = scalar_damage(window.loss)
        else:
            window.loss, damage = float(loss.abs().float().sum()), damage_of(loss)
        if damage and (window.symptom is None or window.entry < 0):
            self.session.see(Symptom("loss", damage.kind, "loss"), entry)

    def look(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at everything an update would build on. Reads the device where values are there."""
        session = self.session
        window = session.window
        if window.symptom is None and window.loss is None:
            self.look_at_losses()
        if window.symptom is None:
            self.look_at_gradients(optimizer)
        if self.unchecked:
            self.look_at_state()
        if session.recorder.roots.has_buffers and window.symptom is None:
            self.look_at_buffers()

    def look_at_losses(self) -> None:
        """Read the losses of this step from the device."""
        window = self.session.window
        damage = _worst(window.losses)
        if not damage and window.losses and window.losses[-1].numel() == 1 and not window.losses[-1].is_complex():
            window.loss = float(window.losses[-1])
        if damage:
            self.session.see(Symptom("loss", damage.kind, "loss"))

    def norm_of(self, optimizer: torch.optim.Optimizer) -> torch.Tensor | float | None:
        """Return the norm of the gradients: the one that clipping computed, or one pass over them."""
        window = self.session.window
        groups = optimizer.param_groups
        parameters = groups[0]["params"] if len(groups) == 1 else parameters_of(optimizer)
        if window.norm is None or not window.clipped.issuperset(map(id, parameters)):
            window.norm = self._computed_norm(optimizer, parameters)
        elif window.marks is None or window.marks != marks_of_gradients(window.clipping) or self._written_unmarked():
            window.norm = worse(window.norm, self._computed_norm(optimizer, parameters))
            window.marks, window.marked = marks_of_gradients(window.clipping), self.session.recorder.tape.number()
        return window.norm

    def _written_unmarked(self) -> bool:
        """Whether a call since the clipping has written to gradients through `.data`, which moves no version counter."""
        window, tape = self.session.window, self.session.recorder.tape
        later = takewhile(lambda entry: entry.number >= window.marked, reversed(tape.entries.values()))
        targets = [leaf for entry in later if entry.kind == "write" for leaf in leaves(target_of(entry))]
        if not targets:
            return False
        places = {memory_of(weight.grad) for weight in window.clipping if weight.grad is not None}
        held = [leaf.tensor if isinstance(leaf, Outside) else tape.alive(leaf) if isinstance(leaf, Slot) else None for leaf in targets]
        return any(tensor is None or memory_of(tensor) in places for tensor in held)

    def _computed_norm(self, optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> torch.Tensor | float | None:
        flat = self._flat.get(id(optimizer))
        if flat is None or self.session.step_count % 64 == 0:
            flat = self._flat[id(optimizer)] = flat_ones(parameters)
        return norm_of_gradients(parameters, flat)

    def look_at_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients of an optimizer's weights."""
        norm = self.norm_of(optimizer)
        if norm is not None and type(norm) is not float:
            norm = self.session.window.norm = float(norm)
        if norm is not None and not _isfinite(norm):
            bad = nonfinite(self.session.named_gradients(optimizer))
            if bad:
                self.session.see(symptom_of("gradient", bad, [name for name, _ in self.session.names_of(parameters_of(optimizer))]))

    def look_at_buffers(self) -> None:
        """Look at the buffers that the forward passes of this step wrote."""
        if bad := self.bad_buffers():
            self.session.see(symptom_of("buffer", bad))

    def bad_buffers(self) -> list[Found]:
        """Return the buffers of one model that the forward passes of this step have made bad."""
        markers = self.markers
        if markers.any_left:
            markers.look_again()
        for state in self.session.recorder.roots.current():
            changed = state.changed_buffers()
            if changed and not surely_finite(changed):
                bad = [found for found in nonfinite(state.named(changed)) if not markers.is_left(found[1]) and not markers.is_one(found[1])]
                if bad:
                    return bad
        return []

    def busy_buffers(self) -> bool:
        """Whether forward passes change buffers: those must be put back before the next forward pass, so do not wait."""
        states = self.session.recorder.roots.current()
        if self.session.step_count < 2:
            for state in states:
                state.changed_buffers()
        return any(state.buffers.changing for state in states)

    def look_at_state(self, judged: bool = True) -> None:
        """Look at weights and optimizer state that were made or loaded since the last look.

        Infinities in a weight may be meant (a transition that cannot be, a bound): those are damage only in a step that is bad, and from a
        finite one on they are known. Where that is not `judged` yet, the weights are looked at once more.
        """
        window, asked = self.session.window, self.unchecked
        todo, self.unchecked = [owner for ref in asked if (owner := ref()) is not None], []
        if not todo:
            self.session.recorder.beside.setup.before = {}
        if not todo or (window.symptom is not None and window.symptom.place not in ("loss", "gradient")):
            return
        bad = self._bad_weights()
        self.session.recorder.beside.loads.look([weight for _, weight, _ in bad])
        if told := self._told(bad):
            self.session.see(symptom_of("parameter", told))
            return
        self.session.recorder.beside.setup.before = {}
        if bad and not judged:
            self.unchecked = asked
        elif window.symptom is None:
            self._note_infinities(bad)
        for owner in todo:
            if isinstance(owner, torch.optim.Optimizer) and (state := self.meant.bad_state(owner)):
                self.session.see(symptom_of("optimizer state", state))
                return

    def look_at_the_end(self) -> None:
        """Look at what the last update has left: no step follows that would meet it. Cost: one reduction per weight and state, once."""
        session = self.session
        inside = {id(p) for root in session.recorder.roots.modules() for p in root.parameters()}
        for optimizer in session.optimizers:
            named = [(name, p) for name, p in session.names_of(parameters_of(optimizer)) if id(p) in inside or not inside]
            known = session.recorder.beside.infinities
            bad = [found for found in nonfinite(named) if not _may_be_meant(*found[1:]) and not known.are_known(found[1])]
            state = [] if bad else self.meant.bad_state(optimizer)
            if bad or state:
                session.see(symptom_of("parameter" if bad else "optimizer state", bad or state))
                return

    def _bad_weights(self) -> list[Found]:
        """Return the weights that are not finite: those of the models of this step, and what else is trained."""
        inside = {id(p): (n, p) for root in self.session.recorder.roots.current_modules() for n, p in root.named_parameters()}
        loose = {id(p): (n, p) for o in self.session.optimizers for n, p in self.session.names_of(parameters_of(o))}
        return nonfinite((loose | inside).values())

    def _told(self, bad: list[Found]) -> list[Found]:
        """Of bad weights, return those that are a symptom: of models, trained, and not meant."""
        trained = {id(p) for o in self.session.optimizers for p in parameters_of(o)}
        inside = trained.intersection(id(p) for root in self.session.recorder.roots.current_modules() for p in root.parameters())
        known, finite = self.session.recorder.beside.infinities, self.session.window.symptom is None
        return [f for f in bad if id(f[1]) in inside and not (finite and _may_be_meant(*f[1:])) and not known.are_known(f[1])]

    def _note_infinities(self, bad: list[Found]) -> None:
        for _, weight, damage in bad:
            if not damage.nan:
                self.session.recorder.beside.infinities.note(weight)


def _may_be_meant(weight: torch.Tensor, damage: Damage) -> bool:
    """Whether a weight may hold its infinities on purpose. Those of both signs in one that learns come from a type that was too small."""
    return not damage.nan and not (damage.posinf and damage.neginf and weight.requires_grad)


def _worst(tensors: list[torch.Tensor]) -> Damage:
    found = Damage()
    for tensor in tensors:
        found = found | damage_of(tensor)
    return found
