"""The catalogue: every rule registers here with its code; the most specific that fits wins.

A rule's docstring is its `explain` page, so this file and the rules import no torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from whynan.causes.fixes import Fix
from whynan.errors import let_through
from whynan.records import Experiment, Phase, Remedy, Span, Symptom

if TYPE_CHECKING:
    from whynan.capsule.replay import Program
    from whynan.capsule.sites import Site
    from whynan.causes.lab import Lab
    from whynan.causes.terms import Named
    from whynan.trace.birth import Birth
    from whynan.trace.jumps import Jump
    from whynan.trace.lines import Line
    from whynan.trace.locate import Targets
    from whynan.tripwire.stillness import Still

FAMILIES = ("standing", "data", "state", "optimizer_state", "updates", "progress", "machine", "reductions", "means", "ranges", "lost_guards",
            "indeterminate", "decompositions", "unselected", "large_gradients", "slopes", "logarithms", "quotients", "domain", "absurd", "limits")  # fmt: skip
OF_SPIKES = ("WN404", "WN205")  # rules that are asked about a finite step


@dataclass(slots=True)
class Scene:
    """All a rule may look at."""

    step: int
    symptom: Symptom
    birth: Birth | None
    program: Program
    targets: Targets
    optimizers: list[Any] = field(default_factory=list)
    optimizer: Any = None
    scaler: Any = None
    clip: float | None = None  # the norm that the program clips its gradients to
    history: list[dict[str, float]] = field(default_factory=list)
    site: Site | None = None
    compiled: bool = False
    trouble: str = ""
    lab: Lab | None = None
    experiments: list[Experiment] = field(default_factory=list)
    made_at: Site | None = None  # where the optimizer was constructed
    healthy: dict[int, Program] = field(default_factory=dict)  # by step: earlier ones that were finite
    still: Still | None = None  # nothing is bad, but nothing is learned either
    jump: Jump | None = None  # nothing is bad, but a number is far outside what it was
    in_data: Line | None = None  # the line of the data set that made a bad sample
    loss: float | None = None  # of the run, where the host knows it
    terms: list[Named] = field(default_factory=list)  # of the loss, by their names in the source
    drifts: bool = False  # further updates without a gradient of the bad elements lead astray
    backwards: int = 0  # passes of this step so far, where that is known
    met: Birth | None = None  # where a step met what this scene, which is none of its own, has made
    failed: list[str] = field(default_factory=list)  # codes of rules that raised when they were asked

    def tried(self, question: str, answer: str) -> None:
        """Write down an experiment."""
        self.experiments.append(Experiment(question, answer))


@dataclass(slots=True)
class Finding:
    """A rule's answer."""

    label: str
    evidence: list[str] = field(default_factory=list)
    fixes: list[Fix] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    proven: bool = False  # shown by an experiment of the rule itself, without a remedy
    backward: bool = False  # born in the forward pass, but only the gradient suffers
    site: Site | None = None  # another place than the birth's
    phase: Phase | None = None  # of that place, where there was no birth
    rows: list[int] = field(default_factory=list)
    among: int = 0  # how many rows the tensor has in which these were counted
    empty: bool = False  # the batch has nothing to teach: a remedy may leave it without gradient
    wrong: list[Fix] = field(default_factory=list)  # tempting changes: tried, so that what they give can be said
    remedies: list[Remedy] = field(default_factory=list)  # tried by the rule itself, elsewhere than at the birth
    title: str = ""  # where the rule's own would not be true


@dataclass(frozen=True, slots=True)
class Rule:
    """One code."""

    code: str
    slug: str
    title: str
    rank: int
    find: Callable[[Scene], Finding | None]

    @property
    def page(self) -> str:
        """The text of `whynan explain CODE`."""
        return inspect.cleandoc(self.find.__doc__ or "")


_rules: dict[str, Rule] = {}


def rule(code: str, slug: str, title: str, rank: int = 50) -> Callable[[Callable[[Scene], Finding | None]], Callable[[Scene], Finding | None]]:
    """Register a rule. Smaller ranks are asked first: specific before general."""

    def register(find: Callable[[Scene], Finding | None]) -> Callable[[Scene], Finding | None]:
        _rules[code] = Rule(code, slug, title, rank, find)
        return find

    return register


def rules() -> dict[str, Rule]:
    """Return all rules by code."""
    for family in FAMILIES if "WN901" not in _rules else ():  # of the last family: an import that was interrupted is made again
        importlib.import_module(f"whynan.causes.{family}")
    return dict(sorted(_rules.items()))


forgiving = True  # the tests turn it off: there a rule that fails is a failure


@contextmanager
def forgiven(scene: Scene, what: str) -> Iterator[list[Exception]]:
    """Go on after a failure of ours, which must not cost the incident; it is noted beside it, and handed to the caller."""
    failed: list[Exception] = []
    try:
        yield failed
    except Exception as error:
        let_through(error)
        if not forgiving:
            raise
        failed.append(error)
        scene.tried(what, f"failed, please report it: {type(error).__name__}: {error}")


def first_match(scene: Scene) -> tuple[Rule, Finding]:
    """Ask the rules in order of rank."""
    scene.failed = []  # a list of its own: other births of the same step are asked about in copies
    for candidate in sorted(rules().values(), key=lambda r: (r.rank, r.code)):
        if scene.jump is not None and candidate.code not in OF_SPIKES:
            continue
        found = None
        with forgiven(scene, f"the rule for {candidate.code}") as failed:
            found = candidate.find(scene)
        scene.failed += [candidate.code] if failed else []
        if found is not None:
            return candidate, found
    raise LookupError("the rule for unknown origins did not answer")
