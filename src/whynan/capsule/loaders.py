"""Doors of data loaders: nothing inside them is recorded, and one that knows its position can be taken back to it."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader

from whynan.capsule.unseen import leave_out, unseen

if TYPE_CHECKING:
    from whynan.capsule.intercept import Interception


@unseen
def watch_loaders(interception: Interception) -> None:
    """Stand where batches are drawn."""
    doors, recorder = interception.doors, interception.doors.recorder
    cls = dataloader._BaseDataLoaderIter
    following, loader_iter = cls.__next__, dataloader.DataLoader.__iter__
    owners: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # iterator of a stateful loader: its loader
    instead: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # an iterator left behind by a rollback: the one after it

    @functools.wraps(following)
    def __next__(self: Any) -> Any:
        try:
            if recorder.here:
                try:
                    if recorder.before_draw:
                        recorder.suspended(recorder.draw)
                    loader: Any = owners.get(self)
                    position = doors.draw_again(loader) if loader is not None else None
                    if position is not None:
                        loader.load_state_dict(position)
                        instead[self] = iter(loader)
                except Exception as error:
                    recorder.faulty(error)
            if self in instead:
                return next(instead[self])
            batch = recorder.suspended(following, self)
            indices = recorder.beside.draws.answered(self)  # also where nothing is recorded: what is left would be taken for a later batch
            if recorder.here:
                try:
                    recorder.suspended(recorder.beside.draws.handed_out, self, indices, batch)
                except Exception as error:
                    recorder.faulty(error)
            return batch
        except BaseException:
            leave_out()
            raise

    interception.replace(cls, "__next__", __next__)
    next_index: Any = cls._next_index

    @functools.wraps(next_index)
    def _next_index(self: Any) -> Any:
        indices = next_index(self)
        recorder.beside.draws.asked(self, indices)
        return indices

    interception.replace(cls, "_next_index", _next_index)

    @functools.wraps(loader_iter)
    def __iter__(self: Any) -> Any:
        try:
            return recorder.suspended(loader_iter, self)
        except BaseException:
            leave_out()
            raise

    interception.replace(dataloader.DataLoader, "__iter__", __iter__)
    stateful = getattr(sys.modules.get("torchdata.stateful_dataloader"), "StatefulDataLoader", None)
    if stateful is not None:
        stateful_iter = stateful.__iter__

        @functools.wraps(stateful_iter)
        def known_iter(self: Any) -> Any:
            try:
                made = recorder.suspended(stateful_iter, self)
                owners[made] = self
                return made
            except BaseException:
                leave_out()
                raise

        interception.replace(stateful, "__iter__", known_iter)
