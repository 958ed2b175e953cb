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
        self._counts: dict[int, Counts] = {}  # by optimizer
        self._seen: dict[int, tuple[weakref.ref[Any], Counts]] = {}  # by id: a scheduler may compare by value
        self._moved: dict[int, list[Moved]] = {}  # by optimizer
        self.averages: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def stepped(self, optimizer: Any, made: bool) -> None:
        """An optimizer made its update, or was kept from it."""
        key = id(getattr(optimizer, "param_groups", None))  # see `_group`: without its call, once a step
        if self._moved:
            self._moved.pop(key, None)
        done, dropped = self._counts.get(key, (0, 0))
        self._counts[key] = (done + made, dropped + (not made))

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers seen so far."""
        return [f for ref, _ in self._seen.values() if isinstance(f := ref(), LRScheduler)]

    def begin(self, follower: Any) -> None:
        """A follower came to be: what happened before it does not concern it."""
        self._note(follower, self._count(_key(follower)))

    def may_move(self, follower: Any) -> bool:
        """Whether a follower's call goes through; it is taken as made."""
        done, dropped = self._count(_key(follower))
        ref, last = self._seen.get(id(follower), (None, (0, 0)))
        if ref is not None and ref() is not follower:
            last = (0, 0)  # of one that is gone
        self._note(follower, (done, dropped))
        if self.keep_wall_steps and isinstance(follower, LRScheduler):
            return True
        return not (done == last[0] and dropped > last[1])

    def _count(self, key: int) -> Counts:
        """Return the updates of an optimizer, or with key 0 of all of them."""
        if key:
            return self._counts.get(key, (0, 0))
        return sum(done for done, _ in self._counts.values()), sum(dropped for _, dropped in self._counts.values())

    def _note(self, follower: Any, counts: Counts) -> None:
        if id(follower) not in self._seen:
            self._seen = {key: entry for key, entry in self._seen.items() if entry[0]() is not None}
        self._seen[id(follower)] = (weakref.ref(follower), counts)

    def about_to_move(self, follower: Any) -> None:
        """Remember a scheduler's state: the step it follows may turn out bad when its flag is read."""
        if not self.keep_wall_steps:
            self._moved.setdefault(_key(follower), []).append(Moved(follower))

    def take_back(self, optimizer: Any) -> None:
        """An optimizer's last step was dropped on the device: put those who followed it back, or keep them from it."""
        for moved in reversed(self._moved.pop(_group(optimizer), [])):
            moved.restore()
        done, dropped = self._counts.get(_group(optimizer), (0, 0))
        self._counts[_group(optimizer)] = (done - 1, dropped + 1)
        for key, (ref, (done, _)) in self._seen.items():
            follower = ref()
            now = self._count(_key(follower))
            if done > now[0]:
                self._seen[key] = (ref, now)  # it had followed the step already, and was put back


def _key(follower: Any) -> int:
    optimizer = getattr(follower, "optimizer", None)  # a scheduler made of others may have none
    return 0 if optimizer is None or isinstance(follower, torch.nn.Module) else _group(optimizer)


def _group(optimizer: Any) -> int:
    """Identify an optimizer by its groups: one that wraps another shares them with it."""
    return id(getattr(optimizer, "param_groups", None))


class Moved:
    """The state of a scheduler and of the rates it sets, or of an optimizer's rates alone, from before a call."""

    def __init__(self, owner: Any) -> None:
        schedules = not isinstance(owner, torch.optim.Optimizer)
        self.schedulers = [(s, _copied(vars(s))) for s in _with_inner(owner)] if schedules else []
        optimizer = getattr(owner, "optimizer", None) if schedules else owner
        self.groups = [(g, _copied(g)) for g in getattr(optimizer, "param_groups", ())]

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
