"""Run an attack, judge what it did, and have it diagnosed once for each place."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from whynan.errors import one_line
from whynan.probing import examining
from whynan.probing.results import Finding, Group, Level
from whynan.probing.steps import Outcome, SubjectStep, Values, attempt, other_weights
from whynan.records import Incident, number
from whynan.tripwire.checks import total_norm
from whynan.tripwire.values import parts

ABSURD = 1e6  # a gradient this many times the sample's, or its own weight
DIAGNOSES = 40  # of one probe; later failures at places not met before are counted only


@dataclass(slots=True)
class Attacks:
    """All attacks on one step, with what they found."""

    step: SubjectStep
    found: list[Finding] = field(default_factory=list)
    tried: dict[Group, int] = field(default_factory=dict)
    usual: float | None = None  # the gradient norm of the sample
    _known: dict[tuple[str, str, int], Incident | None] = field(default_factory=dict)
    _absurd: set[Group] = field(default_factory=set)

    def run(
        self,
        group: Group,
        name: str,
        values: Values,
        inside: bool = True,
        weights: Values | None = None,
        step: SubjectStep | None = None,
        state: AbstractContextManager[object] | None = None,
    ) -> Outcome:
        """Make one attack; what it finds is kept. One that leaves the stated ranges (`inside` false) is a note."""
        self.tried[group] = self.tried.get(group, 0) + 1
        step = step or self.step
        with other_weights(step, weights), state or nullcontext():
            outcome = attempt(step, values)
            if not outcome.fine:
                self._judge(group, name, step, values, outcome, inside)
            elif inside:
                self._weigh(group, name, norm_of(outcome))
        return outcome

    def _weigh(self, group: Group, name: str, norm: float) -> None:
        """Note, once in a group, a gradient that is finite and absurd: it goes into an optimizer's moments all the same."""
        if self.usual is None:
            self.usual = norm
        elif norm > ABSURD * max(self.usual, 1.0) and group not in self._absurd:
            self._absurd.add(group)
            self.note(group, name, f"finite and absurd: the gradient norm is {number(norm)}, on the sample it is {number(self.usual)}")

    def _judge(self, group: Group, name: str, step: SubjectStep, values: Values, outcome: Outcome, inside: bool) -> None:
        error = outcome.error
        if error is not None and (examining.raised_by_user(error) or not _is_numerical(error)):
            self.found.append(Finding(Level.REFUSED, group, name, one_line(error, 120)))
            return
        incident = self._diagnosed(step, values)
        what = f"{type(error).__name__}" if error is not None else f"the {outcome.place} is not finite"
        if incident is None and error is not None:
            self.found.append(Finding(Level.REFUSED, group, name, one_line(error, 120)))
            return
        level = Level.FINDING if inside or has_safe_form(incident) else Level.NOTE
        self.found.append(Finding(level, group, name, what, incident))

    def _diagnosed(self, step: SubjectStep, values: Values) -> Incident | None:
        mark = examining.fingerprint(step, values)
        if mark not in self._known and len(self._known) < DIAGNOSES:
            self._known[mark] = examining.diagnose(step, values)[0]
        return self._known.get(mark)

    def note(self, group: Group, name: str, text: str, level: Level = Level.NOTE) -> None:
        """Keep something that is not a failing step."""
        self.found.append(Finding(level, group, name, text))

    def of(self, group: Group, level: Level = Level.FINDING) -> list[Finding]:
        """Return what a group found."""
        return [f for f in self.found if f.group is group and f.level is level]


def norm_of(outcome: Outcome) -> float:
    """Return the norm of all gradients."""
    return math.sqrt(sum(float(total_norm(parts(g)) or 0.0) ** 2 for g in outcome.gradients if g is not None))


def has_safe_form(incident: Incident | None) -> bool:
    """Whether the same mathematics can be written so that this step is finite: then the line is at fault, not the attack."""
    return incident is not None and any(r.safe and r.diff and r.result == "proven" for r in incident.remedies)


def _is_numerical(error: BaseException) -> bool:
    return isinstance(error, LinAlgError | FloatingPointError | ZeroDivisionError | OverflowError)
