"""What moves along with the optimizer: schedulers, moving averages, the gradient scaler.

A step that was dropped must leave them where they are, though the program goes on to call them. A follower is left out
when the step since its last call was dropped and none was made: so a scheduler called once a step stays in line with the
updates, and one called once an epoch is not held up by a dropped batch. A scheduler follows its optimizer, an average those
that train the model it is handed: what the other half of a GAN does concerns neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

Counts = tuple[int, int]  # updates made, updates dropped
_NONE: Counts = (0, 0)


class Followers:
    """Knows which updates were made and which were dropped, and who has followed them so far."""

    def __init__(self, keep_wall_steps: bool, optimizers: Callable[[], Iterable[torch.optim.Optimizer]]) -> None:
        self.keep_wall_steps = keep_wall_steps  # schedulers count drawn batches instead of updates
        self._optimizers = optimizers  # those that are alive
        self._counts: dict[int, Counts] = {}  # by optimizer
        self._seen: dict[int, tuple[weakref.ref[Any], dict[int, Counts]]] = {}  # by id: a scheduler may compare by value
        self._moved: dict[int, list[Moved]] = {}  # by optimizer
        self.averages: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def stepped(self, optimizer: Any, made: bool) -> None:
        """An optimizer made its update, or was kept from it."""
        key = id(getattr(optimizer, "param_groups", None))  # see `_group`: without its call, once a step
        if self._moved:
            self._moved.pop(key, None)
        done, dropped = self._counts.get(key, _NONE)
        self._counts[key] = (done + made, dropped + (not made))

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers seen so far."""
        return [f for ref, _ in self._seen.values() if isinstance(f := ref(), LRScheduler)]

    def begin(self, follower: Any) -> None:
        """A follower came to be: what happened before it does not concern it."""
        self._note(follower, self._count(_key(follower)))

    def may_move(self, follower: Any, model: Any = None) -> bool:
        """Whether a follower's call goes through; it is taken as made. An average is handed the model that it follows."""
        now = self._count(_key(follower))
        ref, last = self._seen.get(id(follower), (None, {}))
        if ref is not None and ref() is not follower:
            last = {}  # of one that is gone
        self._note(follower, now)
        if self.keep_wall_steps and isinstance(follower, LRScheduler):
            return True
        if not _dropped(now, last):
            return True
        if isinstance(model, torch.nn.Module) and (trained := self._training(model)):
            now = {key: counts for key, counts in now.items() if key in trained}
        return any(done != last.get(key, _NONE)[0] for key, (done, _) in now.items()) or not _dropped(now, last)

    def _training(self, model: torch.nn.Module) -> set[int]:
        """Return the optimizers that train a model."""
        weights = {id(p) for p in model.parameters()}
        return {_group(o) for o in self._optimizers() if any(id(p) in weights for group in getattr(o, "param_groups", ()) for p in group["params"])}

    def _count(self, key: int) -> dict[int, Counts]:
        """Return the updates of an optimizer, or with key 0 of each of them."""
        return {key: self._counts.get(key, _NONE)} if key else self._counts.copy()

    def _note(self, follower: Any, counts: dict[int, Counts]) -> None:
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
        key = _group(optimizer)
        done, dropped = self._counts.get(key, _NONE)
        now = self._counts[key] = (done - 1, dropped + 1)
        for _, last in self._seen.values():
            if last.get(key, _NONE)[0] > now[0]:
                last[key] = now  # it had followed the step already, and was put back

    def rolled_back(self) -> None:
        """Everything was put back: until an optimizer makes another update, nobody follows those it has made."""
        self._counts = {key: (done, dropped + 1) for key, (done, dropped) in self._counts.items()}
        for _, last in self._seen.values():
            last.update({key: (self._counts[key][0], dropped) for key, (_, dropped) in last.items() if key in self._counts})


def _dropped(now: dict[int, Counts], last: dict[int, Counts]) -> bool:
    """Whether a step was dropped since."""
    return any(dropped > last.get(key, _NONE)[1] for key, (_, dropped) in now.items())


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
