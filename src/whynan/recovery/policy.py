"""Policies, chained, and their budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from whynan.errors import UsageError
from whynan.records import Action


class Policy(StrEnum):
    """What to do with a step that is not finite."""

    OBSERVE = "observe"
    SKIP = "skip"
    ROLLBACK = "rollback"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Link:
    """One policy of a chain and how often in a row it may be used."""

    policy: Policy
    times: int


def parse(text: str | Sequence[str], in_a_row: int = 3) -> tuple[Link, ...]:
    """Read a policy, or several to be used one after the other.

    >>> [(str(link.policy), link.times) for link in parse("skip:5,rollback,stop")]
    [('skip', 5), ('rollback', 1), ('stop', 1)]
    """
    words = text.split(",") if isinstance(text, str) else list(text)
    chain = tuple(_link(word, in_a_row) for word in words)
    if len(chain) > 1 and any(link.policy is Policy.OBSERVE for link in chain):
        raise UsageError(f"policy {text!r}: observe stands alone, it does nothing that another could follow")
    if any(link.policy is Policy.STOP for link in chain[:-1]):
        raise UsageError(f"policy {text!r}: nothing can follow stop")
    return chain


def _link(word: str, in_a_row: int) -> Link:
    name, colon, count = str(word).strip().partition(":")
    try:
        policy = Policy(name)
    except ValueError:
        raise UsageError(f"unknown policy {name!r}; choose one of {', '.join(Policy)}, or several as skip:3,rollback,stop") from None
    if colon and not (count.isascii() and count.isdigit()):
        raise UsageError(f"policy {word!r}: the number after the colon says how often in a row, for example {name}:3")
    return Link(policy, int(count) if colon else in_a_row if policy is Policy.SKIP else 1)


@dataclass(slots=True)
class Budget:
    """Counts incidents and decides.

    >>> budget = Budget(parse("skip:1"), in_total=10)
    >>> budget.decide(), budget.decide()
    ('skipped', 'stopped')
    """

    chain: tuple[Link, ...] = (Link(Policy.SKIP, 3),)
    in_total: int = 10
    streak: int = 0
    total: int = 0
    used: dict[int, int] = field(default_factory=dict)  # how often each link was used in this row
    moved: bool = False  # after a dropped step the program itself has written to its weights
    unsure: bool = False  # putting back what a dropped step had changed has failed

    @property
    def observes(self) -> bool:
        """Whether nothing is ever done."""
        return self.chain[0].policy is Policy.OBSERVE

    @property
    def allowed(self) -> int:
        """How many bad steps in a row are lived with."""
        return sum(link.times for link in self.chain if link.policy is not Policy.STOP)

    def includes(self, policy: Policy) -> bool:
        """Whether a policy is part of the chain."""
        return any(link.policy is policy for link in self.chain)

    def decide(self, hopeless: bool = False, can_roll_back: bool = False) -> str:
        """Count one incident and say what to do about it. Hopeless: the state is damaged, skipping cannot help."""
        self.streak += 1
        self.total += 1
        if self.observes:
            return "observed"
        if self.total > self.in_total:
            return "stopped"
        for number, link in enumerate(self.chain):
            if self.used.get(number, 0) < link.times and self._fits(link.policy, hopeless, can_roll_back):
                self.used[number] = self.used.get(number, 0) + 1
                return {Policy.SKIP: "skipped", Policy.ROLLBACK: "rolled back"}.get(link.policy, "stopped")
        return "stopped"

    def _fits(self, policy: Policy, hopeless: bool, can_roll_back: bool) -> bool:
        return not (policy is Policy.SKIP and hopeless) and not (policy is Policy.ROLLBACK and not can_roll_back)

    def level_with(self, others: Sequence[Budget]) -> None:
        """Count what any of the ranks has counted, so that all decide alike."""
        self.streak = max(b.streak for b in others)
        self.total = max(b.total for b in others)
        self.used = {n: max(b.used.get(n, 0) for b in others) for n in range(len(self.chain))}

    def healthy(self) -> None:
        """A finite step ends the row."""
        if self.streak:
            self.streak = 0
            self.used.clear()

    def action(self, taken: str) -> Action:
        """Return the record of what was done."""
        return Action(",".join(str(link.policy) for link in self.chain), taken, self.streak, self.total)
