"""A finite and absurd step is traced to its line while it is still on the tape."""

from __future__ import annotations

import statistics

import torch

from whynan.capsule.alone import is_sharded
from whynan.capsule.replay import Program
from whynan.diagnosis import diagnose_spike
from whynan.engine.acting import Acting
from whynan.engine.gathering import gather
from whynan.engine.session import Session
from whynan.records import Action, Symptom
from whynan.trace.jumps import NEAR, Jump
from whynan.tripwire.spikes import Spike

MOST = 3  # spikes of a run that are traced: each costs some replays


class Tracing:
    """Asks for the place of an absurd spike, a few times in a run."""

    def __init__(self, session: Session, acting: Acting) -> None:
        self.session, self.acting = session, acting
        self._traced = 0

    def spike(self, name: str, spike: Spike, taken: str, optimizer: torch.optim.Optimizer) -> None:
        """Trace a spike of the step that is about to be applied, and tell its place where there is one."""
        session = self.session
        session.earlier.due = max(session.earlier.due, session.step_count + 1)  # this one is no example of a healthy step
        if self._traced >= MOST or session.function is not None or session.window.scaled:
            return  # a step function does more than compute; a scaled gradient is no measure
        if taken == "observed" and session.window.clipped:
            return  # the program bounds such a step by itself
        self._traced += 1
        session.safely(lambda: session.recorder.suspended(self._trace, name, spike, taken, optimizer), None)

    def _trace(self, name: str, spike: Spike, taken: str, optimizer: torch.optim.Optimizer) -> None:
        session = self.session
        tape = session.recorder.tape
        ends = {e.number for e in tape if e.kind == "backward"}
        leaves = session.leaves()
        if not ends or any(is_sharded(leaf) for leaf in leaves):
            return
        symptom = Symptom("loss" if name == "loss" else "gradient", "absurd", name, spike.text(name))
        case = gather(session, symptom, optimizer, None, Program(session.recorder, tape.needed_for(ends), leaves))
        if case.failed:
            return
        case.history = [row for row in case.history if _ordinary(row, case.history)]
        incident = diagnose_spike(case, Jump(name, spike.value, spike.level))
        if incident is not None:
            session.tally.learn(case)
            session.journal.incident(incident, Action("spike", taken or "observed"))


def _ordinary(row: dict[str, float], history: list[dict[str, float]]) -> bool:
    """Whether a step was not itself a spike: remedies are measured by the usual ones."""
    for key in ("loss", "grad_norm"):
        usual = statistics.median([abs(h[key]) for h in history if key in h] or [0.0])
        if key in row and usual and not abs(row[key]) <= NEAR * usual:
            return False
    return True
