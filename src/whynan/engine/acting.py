"""Have a noticed step diagnosed, decide with the budget, and do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from whynan.capsule.replay import Program
from whynan.capsule.snapshot import Snapshot
from whynan.capsule.tape.entries import Entry
from whynan.capsule.tape.needs import needed_for
from whynan.capsule.unseen import unseen
from whynan.capsules import Shelf
from whynan.diagnosis import Case
from whynan.engine.diagnosing import Diagnosing
from whynan.engine.dropping import Dropping
from whynan.engine.gathering import entries_for, gather
from whynan.engine.leaving import Leaving
from whynan.engine.noticing import Found, Noticing
from whynan.engine.partial import TAKEN, without_bad_terms
from whynan.engine.recovering import Recovering
from whynan.engine.session import Session, parameters_of, symptom_of
from whynan.engine.telling import Telling, with_note
from whynan.engine.together import Together
from whynan.engine.undoing import before_update
from whynan.errors import TrainingStopped
from whynan.records import DAMAGED, Incident, Phase, Symptom, is_of_scale
from whynan.recovery.followers import Followers
from whynan.recovery.place import rank_here
from whynan.tripwire.checks import gradients, nonfinite
from whynan.tripwire.values import damage_of, damaged


def _only_the_loss(session: Session, symptom: Symptom, optimizer: Any) -> str:
    """Say that the gradients of a bad loss are finite, where all are: nothing else in the text would. One optimizer may have a part of them."""
    grads = gradients(session.leaves()) if symptom.place == "loss" and optimizer is not None else []
    finite = bool(grads) and not any(damaged(grads))
    return f"only the loss is {symptom.kind}: the gradients of this step are finite" if finite else ""


@unseen
class Acting:
    """Carries out what the policy says about a bad step."""

    def __init__(self, session: Session, noticing: Noticing, followers: Followers, recovering: Recovering, together: Together, capsules: Shelf) -> None:
        self.session, self.followers, self.recovering, self.together, self.capsules = session, followers, recovering, together, capsules
        self.diagnosing = together.diagnosing = Diagnosing(session, capsules)
        self.telling = Telling(session, noticing, together)
        self.dropping = Dropping(session, recovering)
        self.leaving = Leaving(session, noticing, self.telling, self.dropping)
        self._beyond_help = False
        self.drops_terms = False  # a step goes on without the bad terms of its loss
        self.advice: Callable[[str], str] = lambda place: ""  # what a framework in use makes of a bad value

    def act(self, optimizer: Any, scaler: Any = None) -> str:
        """Diagnose the window's symptom, close the incident, and undo what the step has changed so far. Whatever of that fails, the rest is done."""
        session = self.session
        session.window.told = True
        taken = session.safely(lambda: self._settled(optimizer, scaler), "") or ("observed" if session.budget.observes else "skipped")
        session.safely(lambda: session.write_metrics(optimizer), None)
        session.window.taken = taken
        if taken == "rolled back" and not session.safely(self._roll_back, False):
            taken, session.budget.unsure = "skipped", True
        if taken == "skipped":
            self.dropping.drop()
        return taken

    def _roll_back(self) -> bool:
        self.dropping.keep_carried()
        self.recovering.roll_back()
        return True

    def _settled(self, optimizer: Any, scaler: Any) -> str:
        session = self.session
        symptom = session.window.symptom
        assert symptom is not None
        if (self._beyond_help and session.budget.streak) or (session.budget.observes and self.telling.still_dead()):
            session.budget.decide()
            session.journal.again()
            return "observed"  # the state is damaged and nobody is to touch it: the next steps are bad for the same reason
        if symptom.place == "buffer" and not session.window.several and self.leaving.has_left():
            return "observed"
        if session.window.apart:
            return self._leave_alone(gather(session, symptom, optimizer, scaler))
        return session.window.decided or self._decide(symptom, optimizer, scaler, _only_the_loss(session, symptom, optimizer))

    def _decide(self, symptom: Symptom, optimizer: Any, scaler: Any, note: str = "") -> str:
        session = self.session
        try:
            found = session.safely(lambda: self.together.diagnose(lambda: gather(session, symptom, optimizer, scaler)), None)
            incident = found or self.diagnosing.unexplained(session.step_count, symptom)
            if self.together.left:
                return self._settle(self.together.left)
            return self.close(with_note(incident, note), self.drops_terms)
        except TrainingStopped:
            session.window.told = True
            self.dropping.drop()  # what the program saves on its way out is the state before the bad step
            raise

    def _leave_alone(self, case: Case) -> str:
        """Only this rank has a bad value, and the others have made their update by now: tell it at once, wait for nobody."""
        session = self.session
        incident = with_note(self.together.diagnose_alone(case), f"born on rank {rank_here()}, in averaged gradients: the other ranks do not have it")
        wish = session.budget.decide()
        taken = "observed" if session.budget.observes else "skipped"
        session.journal.incident(incident, session.budget.action(taken))
        if taken == "skipped":
            self.together.apart.left = replace(incident, action=session.budget.action(wish))
        return taken

    def _settle(self, left: dict[int, Incident]) -> str:
        """Ranks have left out an update alone, and all know it now: go on where all of them have, else stop, for their weights are not the same."""
        session, incident = self.session, next(iter(left.values()))
        step, before = session.step_count, incident.step
        everyone = len(left) == self.together.size
        if everyone and all(other.action.taken != "stopped" for other in left.values()):
            session.journal.say(f"whynan: step {step} skipped, too: by its gradients the ranks learned that all had left out step {before}")
            return "skipped"
        if rank_here() not in left:
            self.together.heard(incident)
            session.journal.incident(incident, session.budget.action("stopped"), tell=False)
        who = f"rank{'s' * (len(left) > 1)} {', '.join(map(str, left))} alone left out step {before}, so the weights are not the same on all ranks any more"
        reason = f"stopped at step {step}: {incident.cause.title}, at step {before}" if everyone else f"stopped at step {step}: {who}"
        session.journal.say(f"whynan: {reason}")
        session.stop(reason)
        return "stopped"

    def _lost_weights(self) -> list[Found]:
        """Return the weights that are bad by what the program did to them, where it is not known what they were before."""
        known = {id(weight) for weight, _ in self.dropping.made_bad()}
        trained = {id(p): (n, p) for o in self.session.optimizers for n, p in self.session.names_of(parameters_of(o)) if id(p) not in known}
        return [found for found in nonfinite(trained.values()) if not self.session.recorder.beside.infinities.are_known(found[1])]

    def drop_micro_batch(self) -> bool:
        """Drop a bad micro-batch before its backward pass; return whether the step goes on without it."""
        session, window = self.session, self.session.window
        symptom = window.symptom
        assert symptom is not None
        taken = self._decide(symptom, session.optimizers[-1], None)
        if taken != "skipped":
            window.decided = taken  # a rollback is made at the step
            return False
        for state in session.recorder.roots.latest_first(micro_batch=True):
            state.rewind(alone=True)
        session.recorder.tape.entries.pop(window.entry, None)
        window.symptom, window.entry, window.dropped = None, 0, True
        session.window_start = session.recorder.tape.number()  # the program may look at the dropped loss later on
        window.backwards -= 1
        window.losses.pop()
        session.recorder.roots.next_micro_batch()
        self.dropping.hold_places()
        return True

    def close(self, incident: Incident, drops_terms: bool = False) -> str:
        """Decide about an incident, write it, and stop where that is the decision."""
        session = self.session
        damaged_before = incident.cause.code in DAMAGED
        nothing: list[Found] = []
        lost = session.safely(self._lost_weights, nothing) if incident.origin.phase is Phase.PARAMETER and not damaged_before else nothing
        if lost:
            incident = replace(incident, symptom=symptom_of("parameter", lost))
        hopeless = bool(lost) or damaged_before or is_of_scale(incident.symptom)  # which no update of the scaler mends
        taken = session.budget.decide(hopeless, self.recovering.possible and self.together.level)
        if taken == "skipped" and drops_terms and (left_out := session.safely(lambda: self._goes_on_without(incident), "")):
            taken = TAKEN
            incident = with_note(incident, left_out)
        if taken == "skipped" and session.by_hand and session.step_count and not session.in_place:
            taken = "observed"
            incident = with_note(incident, "the program makes its new weights itself, as new tensors: this update could not be left out")
        session.safely(lambda: self._tell(incident, taken), None)
        self._beyond_help = hopeless and session.budget.observes
        if taken == "stopped":
            session.stop(f"stopped at step {incident.step}: {incident.cause.title}")
        return taken

    def _tell(self, incident: Incident, taken: str) -> None:
        self.telling.mourn(incident)
        self.session.journal.incident(incident, self.session.budget.action(taken), tell=self.together.tells)
        self._advise(incident.symptom)

    def _goes_on_without(self, incident: Incident) -> str:
        """Say which bad terms of the loss were left out; the gradients of the good ones are in place then."""
        session, window = self.session, self.session.window
        elsewhere = window.entry < 0 or window.several or window.scaled or window.late or window.inside or session.by_hand or session.function
        if incident.symptom.place not in ("loss", "gradient") or elsewhere:
            return ""
        if any(damage_of(buffer) for root in session.recorder.roots.modules() for buffer in root.buffers()):
            return ""
        entries = entries_for(session, Symptom("gradient", incident.symptom.kind, ""))
        try:
            trained = [p for optimizer in session.optimizers for p in parameters_of(optimizer)]
            return without_bad_terms(Program(session.recorder, entries, session.leaves()), trained)
        except MemoryError:
            return ""

    def _advise(self, symptom: Symptom) -> None:
        """Say once what the framework in use makes of it: its own log may hide it, or be of no use from here on."""
        if text := self.advice(symptom.place):
            self.session.journal.say_once(text)

    def late(self, step: int, symptom: Symptom, entries: dict[int, Entry], optimizer: Any, scaler: Any) -> str:
        """A step that the device has skipped by itself turned out bad: tell it, and put back who followed it."""
        ends = {n for n, e in entries.items() if e.kind in ("backward", "function", "clip", "grad", "zero")}
        program = Program(self.session.recorder, needed_for(entries, ends), self.session.leaves())
        if not self.session.budget.observes:
            self.followers.take_back(optimizer)
            self.session.applied -= 1
        taken = self.close(self.diagnosing.of(gather(self.session, symptom, optimizer, scaler, program, step)))
        if taken == "rolled back":
            self.recovering.roll_back(late=True)
        return taken

    def undo_update(self, optimizer: torch.optim.Optimizer, before: Snapshot) -> str:
        """The optimizer's own arithmetic made the bad value: go back before it, replay it, decide."""
        after = Snapshot(optimizer, gradients=True)
        with before_update(self.session, before):
            taken = self.act(optimizer)
        if taken == "observed":
            after.restore()
        return taken
