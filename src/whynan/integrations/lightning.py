"""Lightning, as `lightning` and as `pytorch_lightning`: a callback, and what stands at Lightning's doors while it is watched.

Lightning asks `meeting.lightning` in every Trainer it makes (entry point `….callbacks_factory`). Nobody watches: nothing happens.
Under `whynan run` and `whynan.watch` the doors below are taken, in a script nobody changed too:

- `ModelCheckpoint` keeps no state that is not finite, and takes no value that is not finite for its best;
- the ranks that Lightning starts by itself run the same `whynan run` command, so that they can agree.
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from typing import Any

import torch

from whynan.engine.guard import Guard
from whynan.integrations.sessions import OwnWatch
from whynan.recovery.health import Role, describe, examine, roles_of

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_LAUNCHERS = (
    "lightning.pytorch.strategies.launchers.subprocess_script",
    "pytorch_lightning.strategies.launchers.subprocess_script",
    "lightning.fabric.strategies.launchers.subprocess_script",
    "lightning_fabric.strategies.launchers.subprocess_script",
)
_SAVES = ("_save_topk_checkpoint", "_save_last_checkpoint", "_save_checkpoint")


def stand(guard: Guard) -> None:
    """Stand at `ModelCheckpoint` and at the launcher of ranks, until the guard is closed."""
    for name in _PACKAGES:
        if name in sys.modules:
            _watch_checkpoints(guard, import_module(f"{name}.callbacks").ModelCheckpoint)
    for name in _LAUNCHERS:
        if name in sys.modules and guard.command and hasattr(sys.modules[name], "_basic_subprocess_cmd"):
            guard.interception.replace(sys.modules[name], "_basic_subprocess_cmd", guard.command.copy)


# -- ModelCheckpoint --------------------------------------------------------------------------------------------


def _watch_checkpoints(guard: Guard, cls: Any) -> None:
    if getattr(cls.check_monitor_top_k, "_whynan", None) is guard:
        return
    gate = _Gate(guard)
    for name in _SAVES:
        if hasattr(cls, name):
            guard.interception.replace(cls, name, gate.around(getattr(cls, name)), lasting=True)
    guard.interception.replace(cls, "check_monitor_top_k", _rank_if_finite(guard, cls.check_monitor_top_k), lasting=True)


class _Gate:
    """Lets a save through if the state is finite; saves call each other, and the outermost is asked."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.passing = False

    def around(self, save: Any) -> Any:
        """Return a save that is asked about first."""

        @functools.wraps(save)
        def checked(owner: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.passing and not self.opens(owner, trainer):
                return None
            outer, self.passing = self.passing, True
            try:
                return save(owner, trainer, *args, **kwargs)
            finally:
                self.passing = outer

        return checked

    def opens(self, owner: Any, trainer: Any) -> bool:
        """Say whether the state may be saved: on all ranks, or on none. Ranks whose watching is off are still asked, and agree."""
        running = self.guard.recorder.running
        reason = self.guard.session.guarded(lambda: self.guard.recorder.suspended(_damage, trainer)) if running else ""
        if trainer.strategy.reduce_boolean_decision(not reason):
            return True
        last = owner._last_checkpoint_saved or owner.best_model_path or "none"
        why = reason or "another rank's state is not finite"
        self.guard.journal.say(f"whynan: ModelCheckpoint: not saved at step {trainer.global_step}: {why}; the last good one is {last}")
        return False


def _damage(trainer: Any) -> str:
    """Say what is not finite in the state that would be saved."""
    parts = {"model": trainer.lightning_module, **{f"optimizer{n or ''}": o for n, o in enumerate(trainer.optimizers)}}
    roles: dict[str, Role] = {}
    for name, part in parts.items():
        roles |= roles_of(name, part)
    hurts = examine(parts, roles)
    return describe(hurts) if hurts else ""


def _rank_if_finite(guard: Guard, check: Any) -> Any:
    @functools.wraps(check)
    def checked(self: Any, trainer: Any, current: Any = None) -> bool:
        finite = current is None or bool(torch.isfinite(torch.as_tensor(current)).all())
        if self.save_top_k <= 0 or trainer.strategy.reduce_boolean_decision(finite):
            return bool(check(self, trainer, current))
        guard.journal.say(f"whynan: ModelCheckpoint: {self.monitor} is {float(current)} at step {trainer.global_step}: not taken for one of the best")
        return False

    checked._whynan = guard  # type: ignore[attr-defined]
    return checked


# -- the callback -----------------------------------------------------------------------------------------------


class _Hooks:
    """Watch `Trainer.fit`: `Trainer(callbacks=[WhynanCallback()])`.

    Takes the options of `whynan.watch`. Not needed under `whynan run`; there it joins what is watched already. The bad steps
    counted so far are kept in the checkpoint: a resumed run goes on with the same budget. A training that is stopped raises
    `whynan.TrainingStopped` out of `fit`.
    """

    def __init__(self, **options: Any) -> None:
        self._own = OwnWatch(options)
        self._loaded: dict[str, int] = {}
        self.incidents: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch: models, optimizers and their state are there, the sanity check is over."""
        self._own.end()
        self._own.begin(pl_module, *trainer.optimizers)
        guard = self._own.guard
        if guard is not None:
            guard.session.guarded(lambda: stand(guard))
            guard.session.budget.total += self._loaded.pop("total", 0)
            guard.session.budget.streak += self._loaded.pop("streak", 0)
            self.incidents = guard.journal.incidents

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End it; `incidents` stays, and so does what a checkpoint saved after `fit` has to say."""
        self._loaded = self.state_dict() if self._own.mine else self._loaded
        self._own.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The training raised: say why, if it is ours to explain."""
        self._own.failed(exception)

    def state_dict(self) -> dict[str, int]:
        """Return what a resumed run has to know."""
        guard = self._own.guard
        budget = guard.session.budget if guard is not None else None
        return {"total": budget.total, "streak": budget.streak} if budget is not None else dict(self._loaded)

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take it from a checkpoint."""
        self._loaded = {k: int(v) for k, v in state_dict.items() if k in ("total", "streak")}


def _bases() -> tuple[type, ...]:
    """Return `Callback` of the packages in use, or of the first that is installed."""
    loaded = [name for name in _PACKAGES if name in sys.modules]
    for name in loaded or _PACKAGES:
        try:
            first = import_module(name).Callback
        except ImportError:
            continue
        return (first, *(import_module(other).Callback for other in loaded if other != name))
    raise ImportError("neither lightning nor pytorch_lightning is installed")


def __getattr__(name: str) -> Any:
    """Make `WhynanCallback` when it is first asked for: before that Lightning need not be there."""
    if name != "WhynanCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = type(name, (_Hooks, *_bases()), {"__module__": __name__, "__doc__": _Hooks.__doc__})
    globals()[name] = made
    return made
