"""What moves along with the optimizer: schedulers, moving averages, the gradient scaler.

A step that was dropped must leave them where they are, though the program goes on to call them. A follower is left out
when the step since its last call was dropped and none was made: so a scheduler called once a step stays in line with the
updates, and one called once an epoch is not held up by a dropped batch.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

Counts = tuple[int, int]  # updates made, updates dropped


class Followers:
    """Knows which updates were made and which were dropped, and who has followed them so far."""

    def __init__(self, keep_wall_steps: bool = False) -> None:
        self.keep_wall_steps = keep_wall_steps  # schedulers count drawn batches instead of updates
        self._counts: dict[int, Counts] = {}  # by optimizer; 0 is all of them
        self._seen: weakref.WeakKeyDictionary[Any, Counts] = weakref.WeakKeyDictionary()
        self._moved: list[Moved] = []
        self.averages: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def stepped(self, optimizer: Any, made: bool) -> None:
        """An optimizer made its update, or was kept from it."""
        self._moved.clear()
        for key in (0, id(optimizer)):
            done, dropped = self._counts.get(key, (0, 0))
            self._counts[key] = (done + made, dropped + (not made))

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers seen so far."""
        return [f for f in self._seen if isinstance(f, LRScheduler)]

    def begin(self, follower: Any) -> None:
        """A follower came to be: what happened before it does not concern it."""
        self._seen[follower] = self._counts.get(_key(follower), (0, 0))

    def may_move(self, follower: Any) -> bool:
        """Whether a follower's call goes through; it is taken as made."""
        done, dropped = self._counts.get(_key(follower), (0, 0))
        last = self._seen.get(follower, (0, 0))
        self._seen[follower] = (done, dropped)
        if self.keep_wall_steps and isinstance(follower, LRScheduler):
            return True
        return not (done == last[0] and dropped > last[1])

    def about_to_move(self, follower: Any) -> None:
        """Remember a scheduler's state: the step it follows may turn out bad when its flag is read."""
        if not self.keep_wall_steps:
            self._moved.append(Moved(follower))

    def take_back(self) -> None:
        """The last step was dropped on the device: put those who followed it back."""
        for moved in reversed(self._moved):
            moved.restore()
        self._moved.clear()


def _key(follower: Any) -> int:
    return id(follower.optimizer) if isinstance(follower, LRScheduler) else 0


class Moved:
    """The state of a scheduler and of the rates it sets, or of an optimizer's rates alone, from before a call."""

    def __init__(self, owner: Any) -> None:
        schedules = not isinstance(owner, torch.optim.Optimizer)
        self.schedulers = [(s, _copied(vars(s))) for s in _with_inner(owner)] if schedules else []
        self.groups = [(g, _copied(g)) for g in (owner.optimizer if schedules else owner).param_groups]

    def restore(self) -> None:
        """Put everything back."""
        for scheduler, saved in self.schedulers:
            _put(vars(scheduler), saved)
        for group, saved in self.groups:
            _put(group, saved)


def _with_inner(scheduler: Any) -> list[Any]:
    found = [scheduler]
    for inner in getattr(scheduler, "_schedulers", None) or ():  # SequentialLR, ChainedScheduler
        found += _with_inner(inner)
    return found


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) for k, v in values.items() if k not in ("params", "optimizer", "_schedulers")}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return list(value) if type(value) is list else dict(value) if type(value) is dict else value


def _put(live: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        held = live.get(key)
        if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor):
            with torch.no_grad():
                held.copy_(value)  # a compiled or capturable optimizer holds on to this very tensor
        else:
            live[key] = _copy(value)
