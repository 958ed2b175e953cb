"""Policies and their budgets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from whynan.records import Action


class Policy(StrEnum):
    """What to do with a step that is not finite."""

    OBSERVE = "observe"
    SKIP = "skip"
    STOP = "stop"


@dataclass(slots=True)
class Budget:
    """Counts incidents and decides.

    >>> budget = Budget(Policy.SKIP, in_a_row=1, in_total=10)
    >>> budget.decide(), budget.decide()
    ('skipped', 'stopped')
    """

    policy: Policy = Policy.SKIP
    in_a_row: int = 3
    in_total: int = 10
    streak: int = 0
    total: int = 0

    def decide(self, hopeless: bool = False) -> str:
        """Count one incident and say what to do about it."""
        self.streak += 1
        self.total += 1
        if self.policy is Policy.OBSERVE:
            return "observed"
        if self.policy is Policy.STOP or hopeless or self.streak > self.in_a_row or self.total > self.in_total:
            return "stopped"
        return "skipped"

    def healthy(self) -> None:
        """A finite step ends the streak."""
        self.streak = 0

    def action(self, taken: str) -> Action:
        """Return the record of what was done."""
        return Action(str(self.policy), taken, self.streak, self.total)
