"""Ask for the diagnosis of a step that is known to be bad. One that fails costs its answer, and nothing that is done about the step."""

from __future__ import annotations

from whynan.capsule.alone import is_sharded
from whynan.capsule.unseen import unseen
from whynan.capsules import Shelf
from whynan.diagnosis import Case, diagnose, unexplained
from whynan.engine.session import Session
from whynan.engine.updating import with_update
from whynan.errors import let_through
from whynan.records import Incident, Symptom
from whynan.recovery.place import rank_here

_FAILED = "the diagnosis failed"
MOST = 2  # steps of a run whose diagnosis may fail: after them none is tried


@unseen
class Diagnosing:
    """The engine's way in to a diagnosis."""

    def __init__(self, session: Session, capsules: Shelf) -> None:
        self.session, self.capsules = session, capsules
        self._failed: dict[int, str] = {}  # steps whose diagnosis failed, and why

    def tried(self, case: Case) -> Incident | None:
        """Diagnose, and write the capsule while the failing state is still there; None where that fails, now or for the same step before."""
        if case.step in self._failed or len(self._failed) >= MOST:
            return None
        if case.failed:
            self._failed[case.step] = case.failed
            return None
        try:
            incident = with_update(diagnose(case), case.optimizer)
        except Exception as error:
            let_through(error)
            self._failed[case.step] = one_line(error)
            self._say(error)
            return None
        self.session.safely(lambda: self._keep(case, incident), None)
        return incident

    def _keep(self, case: Case, incident: Incident) -> None:
        self.session.tally.learn(case)
        if not any(is_sharded(leaf) for leaf in case.program.leaves):  # safetensors crashes on a distributed tensor
            self.capsules.keep(case, incident, self.session.journal)

    def _say(self, error: Exception) -> None:
        self.session.journal.internal_error(error, watching=True)
        if len(self._failed) == MOST:
            self.session.journal.say("whynan: the diagnosis has failed twice: bad steps are noticed and acted on, but not diagnosed from here on")

    def of(self, case: Case) -> Incident:
        """Return what can be said of a case, be it that its diagnosis failed."""
        return self.tried(case) or self.unexplained(case.step, case.symptom)

    def unexplained(self, step: int, symptom: Symptom) -> Incident:
        """Say of a bad step that it is bad, and why nothing else is known."""
        why = self._failed.get(step)
        said = f"{_FAILED}: {why}" if why else f"{_FAILED} twice before" if len(self._failed) >= MOST else _FAILED
        return unexplained(step, rank_here(), symptom, said)


def has_failed(incident: Incident) -> bool:
    """Whether an incident says no more than that."""
    return incident.origin.note.startswith(_FAILED)


def one_line(error: BaseException) -> str:
    """Return an exception in a line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
