"""What the parts of the engine share: the run so far, the optimizer step in progress, and the names of things."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from whynan.capsule.earlier import Earlier
from whynan.capsule.recorder import Recorder
from whynan.capsule.sites import Site
from whynan.capsule.snapshot import Snapshot
from whynan.capsule.state.prints import Marks
from whynan.capsule.tape.entries import Entry, Outside
from whynan.capsule.tape.facts import is_leaf
from whynan.engine.tallying import Tally
from whynan.engine.trained import Trained, are_among
from whynan.engine.trainings import Trainings
from whynan.errors import TrainingStopped, let_through
from whynan.records import Symptom, number_of
from whynan.recovery.policy import Budget
from whynan.report.journal import Journal
from whynan.tripwire.checks import parameters_of as parameters_of  # the engine has it from here
from whynan.tripwire.values import Damage

T = TypeVar("T")
Named = Iterable[tuple[str, torch.Tensor]]
_LISTED = 8  # members of a list that are named


class Window:
    """What is known of the optimizer step in progress."""

    loss: float | None = None  # the last loss, where the host knows it
    symptom: Symptom | None = None
    entry: int = 0  # the backward entry the symptom was seen at; negative: the entry of a loss the program itself looked at
    norm: torch.Tensor | float | None = None
    clipped: frozenset[int] = frozenset()  # the weights whose gradients that is the norm of
    marks: Marks | None = None  # of these gradients as clipping left them; where they are other ones by now the norm says nothing of them
    clipping: Sequence[torch.Tensor] = ()  # the same weights
    marked: int = 0  # the tape's number when they were marked
    backwards: int = 0
    dropped: bool = False  # a micro-batch of it was dropped alone
    scale: float | None = None
    told: bool = False
    taken: str = ""  # what was done about it
    counted: bool = False  # as an overflow of its scaler
    decided: str = ""  # what is to be done about it when the step comes
    noted: bool = False  # the loss of the coming backward pass is known from the scaler
    scaled: bool = False  # a gradient scaler is at work: its overflows are its own business
    several: bool = False  # a process group of several ranks is up
    alone: bool = False  # of several ranks only this one has it, and the others will not know
    agreed: bool = False  # all ranks know that all act on this step
    apart: bool = False  # it was born in averaged gradients, and the others go on to their update
    averaged: torch.Tensor | float | None = None  # the norm of averaged gradients before the program got hold of one, where it did
    widest: float | None = None  # a norm not below that of any rank, where they differ
    received: bool = False  # the symptom is that of another rank
    inside: bool = False  # the backward pass is inside the update (a closure), or the update inside the backward pass (a hook)
    evaluations: int = 0  # how often its closure was evaluated
    late: bool = False  # its values are read when the next step comes
    looked_at: int = 0  # the entry of the last of several bad losses that the program looked at
    left: int = 0  # how many
    outlived: bool = False  # an optimizer was made since it turned out bad: the next backward pass is not of this step
    unfinished: tuple[Snapshot | None, Site | None] = (None, None)  # what there was before an update that raised, and the line that wanted it

    def __init__(self) -> None:  # all else is what the class says until it is set: one is made for every step
        self.losses: list[torch.Tensor] = []


class Session:
    """One watched run."""

    def __init__(self, budget: Budget, journal: Journal) -> None:
        self.recorder = Recorder()
        self.recorder.beside.is_trained = self.trains
        self.recorder.roots.beginning.has_gradients = lambda: any(p.grad is not None for o in self.optimizers for p in parameters_of(o))
        self.earlier = Earlier()
        self.tally = Tally(self.recorder)
        self.trainings, self.trained = Trainings(), Trained()
        self.budget = budget
        self.journal = journal
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.optimizers_met: dict[int, str] = {}  # the kind of each, also of those that are gone
        self.has_several = False  # more than one optimizer; one that is gone may still be counted
        self.by_hand = True  # no optimizer was ever made: the program updates its weights itself
        self.in_place = False  # and was seen to write to one, or to hand the update to an object that can be kept from it
        self.window = Window()
        self.step_count = 0
        self.clip: float | None = None  # the norm that gradients were last clipped to
        self.applied = 0  # updates that were really made
        self.window_start = 0  # the tape's number where this step began
        self.function: Entry | None = None  # what to replay instead of the tape: a step function, an optimizer's step
        self.stepping = False  # an optimizer's own step is running
        self.made_at: dict[int, Site | None] = {}
        self.stopped = ""
        self.last_words: Callable[[], None] = lambda: None  # told before a stop is raised: what runs behind it is the program's
        self.broken: Callable[[BaseException], None] = lambda error: None

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of the program that are still alive."""
        return [optimizer for ref in self._optimizers if (optimizer := ref()) is not None]

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Get to know an optimizer."""
        self.by_hand, self.recorder.tape.forgets = False, True
        self.optimizers_met[id(optimizer)] = type(optimizer).__name__
        alive = self.optimizers
        if all(o is not optimizer for o in alive):
            self._optimizers = [weakref.ref(o) for o in (*alive, optimizer)]
            self.has_several = bool(alive)

    def see(self, symptom: Symptom, entry: Entry | None = None) -> None:
        """Note the symptom of the step in progress."""
        self.window.symptom = symptom
        self.window.entry = entry.number if entry is not None else 0

    def next_step(self, under_way: bool = False, left: int | None = None) -> None:
        """Begin a new optimizer step; its forward pass may have run already.

        One that the program has `left`, whose last known entry that is, was no update: what its models began with stays, for the next one
        may have called them already, and what collectives gave to calls after that entry.
        """
        if self.step_count >= self.earlier.due and self.window.symptom is None:
            self.earlier.keep(self.step_count, self.recorder.tape, self.function)
        self.step_count += 1
        self.window = Window()
        self.recorder.roll(under_way, left)
        self.window_start = self.recorder.tape.number()

    def write_metrics(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Write what the host knows of this step."""
        window = self.window
        norm = window.norm
        if isinstance(norm, torch.Tensor):
            norm = float(norm) if norm.is_cpu else None
        self.journal.metrics(self.step_count, window.loss, norm, None if optimizer is None else rate_of(optimizer), window.scale)

    def stop(self, reason: str) -> None:
        """Stop the training, and again at every later step if the program swallows it."""
        self.stopped = reason
        self.last_words()
        raise TrainingStopped(reason)

    def stop_again(self) -> None:
        """Raise again if the training was stopped."""
        if self.stopped:
            raise TrainingStopped(self.stopped)

    def guarded(self, action: Callable[[], T]) -> T | None:
        """Do something of ours; a failure is logged once and switches the watching off."""
        try:
            return action()
        except TrainingStopped:
            raise
        except Exception as error:
            self.broken(error)
            return None

    def safely(self, action: Callable[[], T], otherwise: T) -> T:
        """Do something of ours that the watching does not hang on: a failure is logged once, and that is all."""
        try:
            return action()
        except Exception as error:
            let_through(error)
            self.journal.internal_error(error, watching=True)
            return otherwise

    # -- names --------------------------------------------------------------------------------------------------

    def leaves(self) -> list[torch.Tensor]:
        """Return everything gradients can end in."""
        found: dict[int, torch.Tensor] = {}
        for optimizer in self.optimizers:
            found.update((id(p), p) for p in parameters_of(optimizer))
        for root in self.recorder.roots.modules():
            found.update((id(p), p) for p in root.parameters())
        for entry in self.recorder.tape:
            for leaf in entry.reads:
                if isinstance(leaf, Outside) and leaf.tensor.requires_grad and is_leaf(leaf.tensor):
                    found[id(leaf.tensor)] = leaf.tensor
        return [leaf for leaf in found.values() if is_leaf(leaf)]  # an optimizer may hold weights that are computed (MAML)

    def trains(self, leaf: torch.Tensor) -> bool:
        """Whether a tensor that gradients end in is a weight: of a model, of an optimizer, or one that a program without optimizers updates."""
        if any(p is leaf for root in self.recorder.roots.modules() for p in root.parameters()):
            return True
        if self.by_hand:
            return self.trained.by_hand(leaf, self.leaves())
        return are_among(leaf, (p for optimizer in self.optimizers for p in parameters_of(optimizer)))

    def names_of(self, parameters: list[torch.Tensor]) -> Named:
        """Name parameters by the models seen so far."""
        names = {id(p): n for root in self.recorder.roots.modules() for n, p in root.named_parameters()}
        for number, parameter in enumerate(parameters):
            yield names.get(id(parameter), f"parameter {number} {shape_of(parameter)}"), parameter

    def named_gradients(self, optimizer: torch.optim.Optimizer) -> Named:
        """Return an optimizer's gradients with the names of their parameters."""
        for name, parameter in self.names_of(parameters_of(optimizer)):
            if parameter.grad is not None:
                yield name, parameter.grad


def rate_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Return the learning rate of an optimizer's first group, where that is one number; a tensor may be one that is trained itself."""
    rate = optimizer.param_groups[0].get("lr")
    return rate if type(rate) is float else number_of(rate)


def shape_of(tensor: torch.Tensor) -> str:
    """Return a shape as text."""
    return str(list(tensor.shape))


def symptom_of(place: str, bad: list[tuple[str, torch.Tensor, Damage]], names: Iterable[str] = ()) -> Symptom:
    """Name the first of several bad tensors and count the others; `names` are those of all tensors, to say which members of a list they are."""
    members = grouped([name for name, *_ in bad], names) if len(bad) > 1 else ""
    return Symptom(place, bad[0][2].kind, bad[0][0], f"{len(bad)} tensors{': ' * bool(members)}{members}" if len(bad) > 1 else "")


def grouped(bad: list[str], names: Iterable[str]) -> str:
    """Name the members of one list of modules that bad tensors belong to; nothing where they are no such list.

    >>> grouped(["heads.0.weight", "heads.3.weight", "heads.3.bias"], [f"heads.{n}.weight" for n in range(8)])
    'heads.0, heads.3 (2 of 8)'
    >>> grouped(["heads.0.weight", "heads.1.weight"], ["heads.0.weight", "heads.1.weight", "trunk.weight"])
    'heads.0, heads.1 (all 2)'
    """
    found = [_member(name) for name in bad]
    lists = {name.rpartition(".")[0] for name in found}
    hit = list(dict.fromkeys(found))
    if len(lists) != 1 or "" in found:
        return ""
    every = {member for name in names if (member := _member(name)) and member.rpartition(".")[0] in lists}
    shown = ", ".join(hit[:_LISTED]) + (" …" if len(hit) > _LISTED else "")
    return f"{shown} ({f'all {len(hit)}' if len(hit) >= len(every) else f'{len(hit)} of {len(every)}'})"


def _member(name: str) -> str:
    """Return the part of a name up to its first number: `heads.3` of `heads.3.weight`."""
    words = name.split(".")
    place = next((n for n, word in enumerate(words) if word.isdigit()), None)
    return ".".join(words[: place + 1]) if place else ""
