"""Tell of a step without touching anything: the program has left it, it raised, or it learns nothing any more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from whynan.capsule.raised import entry_behind, passed_through
from whynan.capsule.replay import Program
from whynan.capsule.snapshot import Snapshot
from whynan.capsule.unseen import unseen
from whynan.engine.gathering import ENDS, gather
from whynan.engine.noticing import Noticing
from whynan.engine.session import Session, parameters_of
from whynan.engine.together import Together
from whynan.engine.undoing import before_update
from whynan.records import DAMAGED, DEAD, Incident, Symptom
from whynan.recovery.place import rank_here
from whynan.tripwire.stillness import Still
from whynan.tripwire.values import damage_of

ALIKE = 3  # diagnoses of one place that a program which skips by itself gets, until an update is made


def with_note(incident: Incident, text: str) -> Incident:
    """Add a line to what is said of an incident, if there is one."""
    return replace(incident, cause=replace(incident.cause, evidence=(*incident.cause.evidence, text))) if text else incident


@unseen
class Telling:
    """Has such steps diagnosed; what was told once is counted from then on."""

    def __init__(self, session: Session, noticing: Noticing, together: Together) -> None:
        self.session, self.noticing, self.together = session, noticing, together
        self._alike, self._applied = 0, -1  # diagnoses in a row that came to the same place with no update between them
        self._dead: torch.Tensor | None = None  # a weight that was told to be damaged

    def report(self, scaler: Any = None, note: str = "", tell: bool = True) -> None:
        """Diagnose and tell without touching anything: the program has already turned away from this step."""
        session = self.session
        symptom = session.window.symptom
        assert symptom is not None
        session.window.told = True
        session.budget.total += 1
        if self.still_dead() or (self._alike >= ALIKE and session.applied == self._applied):
            session.journal.again()  # a program that leaves step after step for one reason is not slowed down by more diagnoses
            return
        incident = self.together.diagnose_alone(gather(session, symptom, None, scaler))
        session.journal.incident(with_note(incident, note), session.budget.action("observed"), tell=tell)
        last = session.journal.incidents[-2:]
        alike = len(last) == 2 and last[0].origin.span == last[1].origin.span and session.applied == self._applied
        self._alike, self._applied = self._alike + 1 if alike else 1, session.applied
        self.mourn(incident)

    def mourn(self, incident: Incident) -> None:
        """Remember a weight that is dead: it is told once, the steps after it are counted."""
        if incident.cause.code in DEAD:
            self._dead = next((leaf for leaf in self.session.leaves() if damage_of(leaf.detach())), None)

    def still_dead(self) -> bool:
        """Whether that weight is damaged as before."""
        return self._dead is not None and bool(damage_of(self._dead.detach()))

    def stands_still(self, still: Still, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is learned any more: tell it; there is no step to skip."""
        session = self.session
        if self.still_dead():
            return  # the weights are damaged, and that was told
        on_tape = any(e.kind in ENDS for e in session.recorder.tape)
        kept = None if on_tape else next(iter(session.earlier.before(session.step_count)), None)
        program = None if kept is None else Program(session.recorder, kept.entries, session.leaves())
        case = gather(session, Symptom("training", "still", still.kind, still.detail), optimizer, None, program)
        incident = self.together.diagnose_alone(replace(case, still=still))
        shared = still.kind != "average"  # running values are each rank's own
        session.journal.incident(incident, session.budget.action("observed"), tell=not (shared and rank_here()))

    def failed_with(self, error: BaseException) -> None:
        """The program raised: say why if the failing call is one of ours to explain."""
        session = self.session
        symptom = Symptom("exception", type(error).__name__, str(error).splitlines()[0] if str(error) else "")
        before, site = session.window.unfinished
        if session.window.symptom is not None and not session.window.told:
            self.report()
        elif before is not None and passed_through(error, site):
            self._explain_update(before, symptom)
        elif (failed := entry_behind(error, session.recorder)) is not None:
            session.recorder.tape.entries[failed.number] = failed
            session.see(symptom, failed)
            session.window.told = True
            self._tell_of(self.together.diagnose_alone(gather(session, symptom, None, None)))

    def look_at_the_end(self) -> None:
        """Tell of weights and moments that are bad when nothing more will be done with them, if that was not told."""
        session = self.session
        told = self.still_dead() or (session.journal.incidents and (session.budget.observes or session.journal.incidents[-1].cause.code in DAMAGED))
        if session.applied and not session.stopped and session.window.symptom is None and not told:
            self.noticing.look_at_the_end()
            if session.window.symptom is not None:
                self.report(note="found when watching ended: no step came after the update that made it")

    def _tell_of(self, incident: Incident) -> None:
        """Tell of an exception, if there is something to say of it."""
        if incident.cause.code != "WN901":
            self.session.journal.incident(incident, self.session.budget.action("observed"))

    def _explain_update(self, before: Snapshot, symptom: Symptom) -> None:
        """An update raised: replay it from before it, and leave everything as it was found."""
        session, optimizer = self.session, before.optimizer
        if any(p.grad is not None and damage_of(p.grad) for p in parameters_of(optimizer)):
            return  # it wrote to its gradients, which were finite: it cannot be made again
        session.see(symptom)
        session.window.told = True
        with Snapshot(optimizer, gradients=True), before_update(session, before):
            self._tell_of(self.together.diagnose_alone(gather(session, symptom, optimizer, None)))
