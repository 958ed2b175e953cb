"""Go back to the last good state, and keep averaged weights where a dropped step found them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from whynan.capsule.doors.loaders import Loop
from whynan.engine.options import Options
from whynan.engine.session import Session, parameters_of
from whynan.recovery.followers import Followers
from whynan.recovery.lastgood import Everything, LastGood, Position
from whynan.recovery.policy import Policy


class Recovering:
    """Takes snapshots where the policy may need them, and carries a rollback out."""

    def __init__(self, session: Session, options: Options, followers: Followers) -> None:
        self.session, self.options, self.followers = session, options, followers
        self.scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.loops: weakref.WeakSet[Loop] = weakref.WeakSet()  # the last one over each loader that knows its position
        self.averages: list[torch.nn.Module] = []  # copies the user told us of and moves by hand
        self.last: LastGood | None = None
        self._rewound: list[tuple[Loop, Position]] = []  # loops to set back, and where to
        self._wanted = (session.budget.includes(Policy.ROLLBACK) or options.spike == "rollback") and options.snapshots != "off"
        self.redoing = False  # batches from before a rollback come again
        self._told = self._refused = False

    @property
    def possible(self) -> bool:
        """Whether there is a state to go back to."""
        return self.last is not None

    def stamp(self) -> int | None:
        """Return which state a rollback goes to, by the updates made before it."""
        return None if self.last is None else self.last.applied

    def begin(self) -> None:
        """Ask for the first snapshot."""
        if self._wanted:
            self.renew()
            with contextlib.suppress(ImportError):
                import torchdata.stateful_dataloader  # type: ignore[import-untyped,import-not-found,unused-ignore]  # noqa: F401 (its doors are watched if it is there)

    def renew(self) -> None:
        """Take a snapshot before the next batch."""
        if self._wanted:
            self.session.recorder.ask_before_draw(self._take)

    def met(self, thing: Any) -> None:
        """A module, scheduler or scaler is about to be used: if for the first time, the snapshot lacks it."""
        if self.last is not None:
            self.last.add(thing)

    def followed(self) -> None:
        """A scheduler or an average moved: a snapshot from between the update and that is out of step with it."""
        if self.last is not None and self.last.since == 0 and not self.session.window.backwards:
            self.renew()

    def finished(self, applied: bool, by_scaler: bool, rolled_back: bool) -> None:
        """A step is over; take a snapshot before the next batch if one is due. A step that a scaler skipped by itself it will skip again."""
        last = self.last
        if last is None or rolled_back:
            return  # the step that was rolled back is noted by `LastGood` itself
        if not applied and not by_scaler:
            last.bad.add(last.since)
        last.since += 1
        if applied and self.session.applied - last.applied >= self.options.snapshot_every:
            self.renew()

    def _take(self) -> None:
        session = self.session
        state = self.everything()
        if not state.optimizers:
            return  # nothing trains yet: ask again
        session.recorder.before_draw.remove(self._take)
        if session.guarded(lambda: state.damaged(self.last)) is not False:
            self._say_refused()
            return
        ahead = {step - self.last.since for step in self.last.bad if step >= self.last.since} if self.last is not None and self.redoing else set()
        self.last = session.guarded(lambda: LastGood(state, session.applied, self.options.snapshots == "host", ahead))
        self.redoing = bool(ahead)
        if self.last is not None and not self._told:
            self._told = True
            size = _megabytes(self.last.nbytes)
            session.journal.say(
                f"whynan: the last good state is kept on the {self.options.snapshots}: {size}, renewed every {self.options.snapshot_every} updates"
            )

    def _say_refused(self) -> None:
        """Say once that no newer state can be kept: a rollback goes far back then, or nowhere."""
        if not self._refused:
            self._refused = True
            kept = "there is none to go back to" if self.last is None else f"a rollback goes to the one after {self.last.applied} updates"
            self.session.journal.say(f"whynan: the state after {self.session.applied} updates is not finite and not kept: {kept}")

    def everything(self) -> Everything:
        """Return the objects that make up the state of the run."""
        modules = [*self.session.recorder.roots.modules(), *self.followers.averages, *self.averages]
        return Everything(list(self.session.optimizers), modules, self.followers.schedulers, list(self.scalers), list(self.loops))

    def roll_back(self, late: bool = False) -> None:
        """Put the last good state back, for the step in progress or, read late, for the one before it: what it does now is made anew."""
        assert self.last is not None
        positions = self.last.restore(self.options.rewind_data, self.last.since - late)
        self._rewound = [(loop, found) for loop in self.loops for found in positions if found.loader is loop.loader]
        self.session.applied = self.last.applied
        self.followers.rolled_back()
        self.redoing = bool(self._rewound)
        self._lower_rates(self.options.lr_after_rollback)
        self.hold_averages()

    def looped(self, loop: Loop) -> None:
        """A loop over a loader begins: a snapshot that does not know the loader takes it in at its beginning."""
        self.loops -= {known for known in self.loops if known.loader is loop.loader}
        self.loops.add(loop)
        if self.last is not None:
            self.last.add(loop)

    def rewind(self, loop: Loop) -> None:
        """Take a loop that was going on at a rollback back to the snapshot's position, once; one that was begun since is a new one."""
        for known, position in self._rewound:
            if known is loop:
                self.session.recorder.suspended(loop.go_back, position.state, position.playing, position.drawn)
        self._rewound = [(known, position) for known, position in self._rewound if known.loader is not loop.loader]

    def _lower_rates(self, factor: float) -> None:
        if factor == 1.0:
            return
        for optimizer in self.session.optimizers:
            for group in optimizer.param_groups:
                for key in ("lr", "initial_lr"):
                    if isinstance(group.get(key), int | float | torch.Tensor):  # not None: that finds its rate itself
                        group[key] = group[key] * factor
        for scheduler in self.followers.schedulers:
            if hasattr(scheduler, "base_lrs"):
                scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]

    def met_before(self) -> bool:
        """Whether this step's batch was dropped before the rollback and comes again now."""
        return self.redoing and self.last is not None and self.last.since in self.last.bad

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip tighter after a rollback, where the user asked for it."""
        limit = self.options.clip_after_rollback
        if limit is not None and self.last is not None and self.last.restored:
            parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
            grads = [p.grad for p in parameters if p.grad is not None]
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, torch.nn.utils.get_total_norm(grads))

    def hold_averages(self) -> None:
        """A step was dropped: the program goes on to move its averages; put them back before they are used."""
        if not self.averages:
            return
        held = [(t, t.detach().clone()) for m in self.averages for t in (*m.parameters(), *m.buffers())]

        def put_back() -> None:
            _write(held)
            if torch.is_grad_enabled():
                self.session.recorder.before_call = None
            else:  # a validation, after which the program may still move its averages, or the call of a target, which may write its own buffers
                held[:] = [kept for kept in held if isinstance(kept[0], torch.nn.Parameter)]

        self.session.recorder.before_call = put_back


def _write(held: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, copy in held:
            tensor.copy_(copy)


def _megabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
