"""Run a training program with a fault under whynan, and work out which program without it the outcome must equal."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from choices import CODES, IN_STATE, STEPS, Case
from training import Event, Player

import whynan
from whynan import diagnosis
from whynan.engine.together import finite
from whynan.errors import TrainingStopped
from whynan.records import NOWHERE, Cause, Confidence, Origin, Phase

EPOCH = 3  # optimizer steps in an epoch


@dataclass
class Outcome:
    """How a program ended."""

    state: dict[str, Any]
    losses: dict[int, list[float]]
    incidents: list[Any] = field(default_factory=list)
    stopped: str = ""
    said: str = ""


# -- watched and not ----------------------------------------------------------------------------------------------


def all_events() -> list[Event]:
    """What the program does by itself."""
    events: list[Event] = []
    for number in range(STEPS):
        events.append(("step", number, -1))
        if number % EPOCH == EPOCH - 1:
            events.append(("epoch", number, -1))
    return events


def unwatched(case: Case, events: list[Event], faulty: bool = False) -> Outcome:
    """Run the program without whynan."""
    player = Player(case, faulty)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        player.world.make_optimizers()
        player.play(events)
    return Outcome(player.world.state(), player.losses)


def watched(case: Case) -> Outcome:
    """Run the program with its faults under `whynan.watch`."""
    player = Player(case, True)
    world, stopped, said = player.world, "", io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stderr(said):
        warnings.simplefilter("ignore")
        if case.way != "made inside":
            world.make_optimizers()
        given = [world.net, *getattr(world, "optimizers", [])]
        guard = whynan.watch(*given, files=False, averages=[world.averaged] if world.averaged is not None else [], in_total=50, **_options(case))
        with stopping() as end, guard:
            if case.way == "made inside":
                world.make_optimizers()
            player.mark = guard.step
            player.play(all_events())
        stopped = end[0] if end else ""
    return Outcome(world.state(), player.losses, guard.incidents, stopped, said.getvalue())


@contextlib.contextmanager
def only_replayed(place: str) -> Iterator[None]:
    """Replay a failing step once, where a whole diagnosis traces it, explains it and tries remedies; the cause is given."""
    cause = Cause(CODES[place][0], "", "given", Confidence.SUSPECTED)

    def find(case: diagnosis.Case, targets: Any) -> tuple[None, str]:
        finite(case.program)
        return None, ""

    judged = Origin(Phase.FORWARD, NOWHERE), cause, [], []
    with mock.patch.object(diagnosis, "_find", find), mock.patch.object(diagnosis, "judge", lambda scene: judged):
        yield


@contextlib.contextmanager
def stopping() -> Iterator[list[str]]:
    """Take the exception that ends a stopped training."""
    end: list[str] = []
    try:
        yield end
    except TrainingStopped as stop:
        end.append(str(stop))


def _options(case: Case) -> dict[str, Any]:
    names = ("policy", "drop_alone", "wall_steps", "snapshot_every", "snapshots")
    return {name: getattr(case, name) for name in names}


# -- what must come out -------------------------------------------------------------------------------------------


@dataclass
class Script:
    """The events a watched run must equal, and what was done at which step."""

    events: list[Event] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)


class Expecting:
    """Follows the policy through a run: which updates count in the end."""

    def __init__(self, case: Case, noticed: int) -> None:
        self.case, self.noticed = case, noticed  # the step at which a bad state shows
        self.script = Script()
        self.links = [(w.partition(":")[0], int(w.partition(":")[2] or 3)) for w in case.policy.split(",")]
        self.used: dict[int, int] = {}
        self.applied = 0
        self.kept: tuple[int, list[Event]] = (0, [])
        self.moved = True  # something happened since the last epoch's end

    def follow(self) -> Script:
        """Return the script."""
        for kind, number, _ in all_events():
            if kind == "epoch":
                self.script.events.append((kind, number, -1))
            else:
                self.renew(number)
                if not self.step(number):
                    break
        return self.script

    def renew(self, number: int) -> None:
        """A snapshot is taken before a step where one is due; of a state that is bad, none."""
        spoilt = self.case.place in IN_STATE and self.case.at <= number <= self.noticed
        if self.applied - self.kept[0] >= self.case.snapshot_every and not spoilt:
            self.kept = (self.applied, list(self.script.events))

    def step(self, number: int) -> bool:
        """One step; whether the run goes on."""
        state = self.case.place in IN_STATE
        if number == self.noticed if state else number in self.case.bad_steps:
            return self.act(number, state)
        self.make(("step", number, -1))
        return True

    def make(self, event: Event) -> None:
        self.applied += 1 + (self.case.optimizer == "Muon")  # a second optimizer steps along
        self.used.clear()
        self.script.events.append(event)

    def act(self, number: int, hopeless: bool) -> bool:
        taken = self.decide(hopeless)
        self.script.taken.append(taken)
        if taken == "stopped":
            return False
        if taken == "rolled back":
            self.applied, self.script.events = self.kept[0], list(self.kept[1])
        elif self.case.alone and self.case.accumulate > 1:
            self.make(("step", number, self.case.micro))
        elif self.case.wall_steps and self.case.rhythm == "step":
            self.script.events.append(("wall", number, -1))
        return True

    def decide(self, hopeless: bool) -> str:
        for index, (name, times) in enumerate(self.links):
            if self.used.get(index, 0) < times and not (name == "skip" and hopeless):
                self.used[index] = self.used.get(index, 0) + 1
                return {"skip": "skipped", "rollback": "rolled back"}.get(name, "stopped")
        return "stopped"


def differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Return the places at which two trees of state are not equal bit for bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and _bits(left) == _bits(right)
        return [] if same else [f"{where}: {left.tolist()} is not {right.tolist()}"]
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            return [f"{where}: {list(left)} is not {list(right)}"]
        return [found for key in left for found in differences(left[key], right[key], f"{where}.{key}")]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        if len(left) != len(right):
            return [f"{where}: {len(left)} is not {len(right)} long"]
        return [found for n, (a, b) in enumerate(zip(left, right, strict=True)) for found in differences(a, b, f"{where}[{n}]")]
    return [] if left == right or (left != left and right != right) else [f"{where}: {left!r} is not {right!r}"]


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
