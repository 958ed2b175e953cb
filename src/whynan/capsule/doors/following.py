"""Doors for what moves along with an optimizer: schedulers, moving averages and the gradient scaler."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from whynan.capsule.unseen import leave_out, unseen

if TYPE_CHECKING:
    from whynan.capsule.doors.interception import Interception


@unseen
def watch_followers(interception: Interception) -> None:
    """Stand at `step` of every scheduler class and at `update_parameters` of averaged models."""
    doors = interception.doors
    for cls in (LRScheduler, *_below(LRScheduler)):
        _watch_creation(interception, cls)
        watch_moves(interception, cls, "step")
    init = AveragedModel.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **kwargs)
            doors.following.made(self)
        except BaseException:
            leave_out()
            raise

    interception.replace(AveragedModel, "__init__", __init__)
    watch_moves(interception, AveragedModel, "update_parameters")


def _below(cls: Any) -> list[Any]:
    found: list[Any] = []
    for sub in cls.__subclasses__():
        found += [sub, *_below(sub)]
    return found


@unseen
def _watch_creation(interception: Interception, cls: Any) -> None:
    """A scheduler's first step is part of its making; classes written later are met here."""
    if "__init__" not in vars(cls):
        return
    init, reach = cls.__init__, interception.reach

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if (recorder := reach.recorder) is None:
            init(self, *args, **kwargs)
            return
        try:
            reach.interception.watch_moves_of(type(self))
            recorder.suspended(init, self, *args, **kwargs)
            reach.doors.following.made(self)
        except BaseException:
            reach.leave_out()
            raise

    interception.replace(cls, "__init__", __init__)


@unseen
def watch_moves(interception: Interception, cls: Any, name: str) -> None:
    """Stand where a class of followers moves, once."""
    original, reach = vars(cls).get(name), interception.reach
    if original is None or getattr(getattr(original, "_whynan", None), "recorder", None):
        return

    @functools.wraps(original)
    def move(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (recorder := reach.recorder) is None:
            return original(self, *args, **kwargs)
        try:
            if recorder.here:
                return recorder.suspended(reach.doors.following.follow, original, self, args, kwargs)
            if recorder.replays_here:
                return None
            return original(self, *args, **kwargs)
        except BaseException:
            reach.leave_out()
            raise

    move._whynan = reach  # type: ignore[attr-defined]
    interception.replace(cls, name, move)


@unseen
def watch_scaler(interception: Interception) -> None:
    """Stand at the gradient scaler's own calls."""
    doors, recorder = interception.doors, interception.doors.recorder
    cls = torch.amp.GradScaler
    scale, step, unscale, update = cls.scale, cls.step, cls.unscale_, cls.update

    @functools.wraps(scale)
    def watched_scale(self: Any, outputs: Any) -> Any:
        try:
            if recorder.here and self.is_enabled():
                doors.scaling.scaled(self, outputs)
            return scale(self, outputs)
        except BaseException:
            leave_out()
            raise

    @functools.wraps(step)
    def watched_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if recorder.here and self.is_enabled():
                return recorder.suspended(doors.scaling.step, step, self, optimizer, args, kwargs)
            if recorder.replays_here:
                return recorder.left_out(optimizer, args, kwargs)
            return step(self, optimizer, *args, **kwargs)
        except BaseException:
            leave_out()
            raise

    @functools.wraps(update)
    def watched_update(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            if recorder.here and self.is_enabled():
                return recorder.suspended(doors.scaling.update, update, self, args, kwargs)
            if recorder.replays_here:
                return None
            return update(self, *args, **kwargs)
        except BaseException:
            leave_out()
            raise

    @functools.wraps(unscale)
    def watched_unscale(self: Any, optimizer: Any) -> Any:
        try:
            if recorder.replays_here:
                return None  # it can be called once a step
            return recorder.suspended(unscale, self, optimizer)
        except BaseException:
            leave_out()
            raise

    interception.replace(cls, "scale", watched_scale)
    interception.replace(cls, "step", watched_step)
    interception.replace(cls, "update", watched_update)
    interception.replace(cls, "unscale_", watched_unscale)
