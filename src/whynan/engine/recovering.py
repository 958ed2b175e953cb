"""Go back to the last good state, and keep averaged weights where a dropped step found them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from whynan.engine.options import Options
from whynan.engine.session import Session, parameters_of
from whynan.recovery.followers import Followers
from whynan.recovery.lastgood import Everything, LastGood
from whynan.recovery.policy import Policy


class Recovering:
    """Takes snapshots where the policy may need them, and carries a rollback out."""

    def __init__(self, session: Session, options: Options, followers: Followers) -> None:
        self.session, self.options, self.followers = session, options, followers
        self.scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()
        self.averages: list[torch.nn.Module] = []  # copies the user told us of and moves by hand
        self.last: LastGood | None = None
        self._rewound: list[tuple[Any, Any]] = []  # loaders to set back, with their position
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

    def finished(self, applied: bool, rolled_back: bool) -> None:
        """A step is over; take a snapshot before the next batch if one is due."""
        last = self.last
        if last is None or rolled_back:
            return  # the step that was rolled back is noted by `LastGood` itself
        if not applied:
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
        modules = [*self.session.recorder.roots(), *self.followers.averages, *self.averages]
        return Everything(list(self.session.optimizers), modules, self.followers.schedulers, list(self.scalers), list(self.loaders))

    def roll_back(self) -> None:
        """Put the last good state back."""
        assert self.last is not None
        self._rewound = self.last.restore(self.options.rewind_data)
        self.session.applied = self.last.applied
        self.followers.rolled_back()
        self.redoing = bool(self._rewound)
        self._lower_rates(self.options.lr_after_rollback)
        self.hold_averages()

    def position_of(self, loader: Any) -> Any:
        """Return where a loader has to go back to after a rollback, once."""
        self.loaders.add(loader)
        found = [position for known, position in self._rewound if known is loader]
        self._rewound = [(known, position) for known, position in self._rewound if known is not loader]
        return found[0] if found else None

    def _lower_rates(self, factor: float) -> None:
        if factor == 1.0:
            return
        for optimizer in self.session.optimizers:
            for group in optimizer.param_groups:
                for key in ("lr", "initial_lr"):
                    if key in group:
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
            if torch.is_grad_enabled():  # else a validation, after which the program may still move its averages
                self.session.recorder.before_call = None
            _write(held)

        self.session.recorder.before_call = put_back


def _write(held: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, copy in held:
            tensor.copy_(copy)


def _megabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
