"""Doors of data loaders: nothing inside them is recorded, and one that knows its position can be taken back to it."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import dataloader

from whynan.capsule.unseen import leave_out, unseen

if TYPE_CHECKING:
    from collections.abc import Callable

    from whynan.capsule.doors.interception import Interception


_LOOP = "_whynan_loop"  # on the iterator of a loader that knows its position


@unseen
class Loop:
    """One loop of the program over a loader that knows its position; after a rollback it draws from another iterator than its own.

    The loops between the position it goes back to and itself are over: what they would have drawn comes in this one.
    """

    def __init__(self, loader: Any, number: int, begin: Callable[[Any], Any]) -> None:
        self.loader, self._begin = loader, begin
        self.number = self.playing = number  # which loop over its loader this is, and which one's batches are drawn
        self.instead: Any = None

    def go_back(self, position: Any, playing: int, drawn: torch.Tensor | None) -> None:
        """Draw from a position on that the loader had in a loop, this one or an earlier; `drawn` is the state of its generator there.

        The random numbers that an iterator takes when it begins were taken before that position.
        """
        present = torch.get_rng_state()
        self.loader.load_state_dict(position)
        self.instead, self.playing = self._begin(self.loader), playing
        torch.set_rng_state(present)
        if drawn is not None:
            self.loader.generator.set_state(drawn)

    def following(self) -> Any:
        """Return the next batch after a rollback."""
        while True:
            try:
                return next(self.instead)
            except StopIteration:
                if self.playing >= self.number:
                    raise
            self.playing += 1
            self.instead = self._begin(self.loader)


@unseen
def watch_loaders(interception: Interception) -> None:
    """Stand where batches are drawn."""
    doors, recorder = interception.doors, interception.doors.recorder
    cls = dataloader._BaseDataLoaderIter
    following, loader_iter = cls.__next__, dataloader.DataLoader.__iter__
    begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how many loops over a stateful loader there were

    @functools.wraps(following)
    def __next__(self: Any) -> Any:
        try:
            loop: Loop | None = getattr(self, _LOOP, None)
            if recorder.here:
                try:
                    if recorder.before_draw:
                        recorder.suspended(recorder.draw)
                    if loop is not None:
                        doors.recovering.rewind(loop)
                except Exception as error:
                    recorder.faulty(error)
            if loop is not None and loop.instead is not None:
                return loop.following()
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
        begin = functools.partial(recorder.suspended, stateful_iter)

        @functools.wraps(stateful_iter)
        def known_iter(self: Any) -> Any:
            try:
                made = begin(self)
                begun[self] = begun.get(self, 0) + 1
                loop = Loop(self, begun[self], begin)
                setattr(made, _LOOP, loop)  # in a table of ours neither would be freed: a loader holds its last iterator
                try:
                    doors.recovering.looped(loop)
                except Exception as error:
                    recorder.faulty(error)
                return made
            except BaseException:
                leave_out()
                raise

        interception.replace(stateful, "__iter__", known_iter)
