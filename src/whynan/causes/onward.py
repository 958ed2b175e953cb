"""A remedy some updates further on: this step and the healthy ones before it in turn, with the program's own optimizer between them.

One step can be finite and lead nowhere: a bound under one operation leaves a steep slope at the next, or it lets no gradient
through, so that nothing leads back over it and the rest of the batch pushes more elements there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from whynan.capsule.doors.collectives import several
from whynan.capsule.replay import Program
from whynan.capsule.snapshot import copied, copy_of
from whynan.capsule.stepped import has_hooks, is_of_a_library, unwatched_step
from whynan.causes.catalogue import Scene
from whynan.causes.lab import NO_MEMORY, Lab, Outcome
from whynan.causes.stopped import Stopped
from whynan.causes.swapping import Put
from whynan.causes.widening import size_of
from whynan.errors import let_through
from whynan.tripwire.checks import total_norm

UPDATES = 8
PARAMETERS, VALUES = 1_000_000, 20_000_000  # of the program, and computed in the step: above them so many replays take too long
FAR = 1000  # how many times a step's own loss is absurd
_GROWN = 3  # by how many times, and by how many elements, those outside of a domain have to become more


@dataclass(frozen=True, slots=True)
class Walk:
    """How it went: this step, then after each update the next one."""

    outcomes: list[Outcome]
    held: list[Stopped]  # what a change keeps back at the edge of a domain, each time that the failing step was played
    astray: int = 0  # the update after which a step was not finite, or absurd

    def objection(self) -> str:
        """Say what it shows against a remedy that was good for one step."""
        now, last = self.outcomes[0], self.outcomes[-1]
        if self.astray:
            how = "absurd" if last.finite else "not finite"
            return f"finite now, but {how} {_updates(self.astray)} further on: {last.effect()} (now {now.effect()})"
        first, later = self.held[0].beyond, self.held[-1].beyond
        if later < first + _GROWN or later < _GROWN * first:
            return ""
        return f"finite, but nothing leads back: {first} of {self.held[0].among} elements are outside of the domain, {_updates(UPDATES)} further on {later}"

    def words(self) -> str:
        """Say what it shows for it."""
        return f"still finite {_updates(UPDATES)} further on"


def _updates(count: int) -> str:
    return "one update" if count == 1 else f"{count} updates"


def onward(scene: Scene, put: Put, stopped: list[Stopped]) -> Walk | None:
    """Walk on with a change; None where that cannot be done, or where the program as it is goes astray on its healthy steps, too.

    Cost: as many replays as updates, a copy of the weights and of the optimizer's state; nothing of it stays.
    """
    lab, optimizer = scene.lab, _optimizer(scene)
    assert lab is not None
    if optimizer is None or not _is_short(scene, lab) or not _fit(lab, optimizer):
        return None
    before = list(stopped)
    try:
        walk = _walk(scene, lab, put, optimizer, [lab.program, *lab.healthy.values()], stopped)
        if walk is None or not walk.objection():
            return walk
        if not lab.healthy:
            return None  # what the program does between a backward pass and its update is not known: only its healthy steps show that updates are like this
        usual = _walk(scene, lab, None, optimizer, list(lab.healthy.values()), [])
        return None if usual is None or usual.astray else walk
    except Exception as error:  # an optimizer that wants more than gradients, or gets none
        let_through(error)
        return None
    finally:
        stopped[:] = before


def _optimizer(scene: Scene) -> torch.optim.Optimizer | None:
    """Return the optimizer that this step is for, where that is known."""
    alive = [o for o in scene.optimizers if isinstance(o, torch.optim.Optimizer)]
    found = scene.optimizer if scene.optimizer is not None else alive[0] if len(alive) == 1 else None
    return found if isinstance(found, torch.optim.Optimizer) else None


def _is_short(scene: Scene, lab: Lab) -> bool:
    computed = sum(math.prod(op.shape) for op in scene.birth.graph.ops) if scene.birth is not None else 0
    return size_of(lab.program) <= PARAMETERS and computed <= VALUES


def _fit(lab: Lab, optimizer: torch.optim.Optimizer) -> bool:
    """Whether the program plays a whole step, and nobody but its optimizer, one of a library, sees the updates or changes the gradients before them."""
    if not lab.small or lab.cut or lab.jump is not None or lab.program.undo is not None or several():
        return False
    if any(isinstance(value, torch.nn.Module | torch.optim.Optimizer) for value in vars(optimizer).values()):
        return False
    if has_hooks(optimizer) or not is_of_a_library(optimizer) or any(p.is_shared() for p in _weights(optimizer)):
        return False
    held = {id(leaf) for leaf in lab.program.leaves}
    return all(type(p) in (torch.nn.Parameter, torch.Tensor) and id(p) in held for p in _weights(optimizer))


def _weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _walk(scene: Scene, lab: Lab, put: Put | None, optimizer: torch.optim.Optimizer, programs: list[Program], stopped: list[Stopped]) -> Walk | None:
    walk = Walk([], [])
    with _kept(optimizer):
        step = _step(scene, lab, copy_of(optimizer, {id(p): p for p in _weights(optimizer)}))
        for update, program in enumerate(itertools.islice(itertools.cycle(programs), UPDATES + 1)):
            stopped.clear()
            outcome = lab.run(put, program=program, after=step)
            if outcome is NO_MEMORY:
                return None
            walk.outcomes.append(outcome)
            if program is lab.program:
                walk.held.append(Stopped(among=sum(each.among for each in stopped), beyond=sum(each.beyond for each in stopped)))
            at_first = abs(walk.outcomes[0].loss or 0.0) if program is programs[0] else 0.0  # a step that is rightly large may stay so
            if not outcome.finite or outcome.error or abs(outcome.loss or 0.0) > max(lab.ceiling(), FAR * at_first):
                return replace(walk, astray=update)
    return walk


def _step(scene: Scene, lab: Lab, optimizer: torch.optim.Optimizer) -> Callable[[Program], None]:
    """Return what makes an update with the gradients that a replay left, unscaled and clipped as the program does it."""

    def step(program: Program) -> None:
        grads = [p.grad for p in _weights(optimizer) if p.grad is not None]
        if not grads:
            raise ValueError("the replay leaves no gradients for this optimizer")
        scale = lab.scale if program.entries[-1].kind == "backward" else 1.0
        norm = total_norm([g.to_dense() if g.is_sparse else g for g in grads])
        shrink = 1 / scale if scene.clip is None or norm is None else min(1 / scale, scene.clip / (float(norm) + 1e-6))
        with torch.no_grad():
            for grad in grads if shrink != 1 else ():
                grad.mul_(shrink)
        unwatched_step(optimizer)(optimizer)

    return step


@contextmanager
def _kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put the weights back; what a live graph has saved of them is still what it was."""
    weights = [(p, copied(p)) for p in _weights(optimizer)]
    with torch.autograd._unsafe_preserve_version_counter(tuple(p for p, _ in weights)):  # type: ignore[attr-defined]
        try:
            yield
        finally:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                for weight, before in weights:
                    weight.copy_(before)
