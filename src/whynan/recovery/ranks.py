"""Agreement between the ranks of a job, on torch.distributed and nothing else.

Data parallel ranks step together, so they can also talk together at a step. Nothing here is called unless all of them do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_MOMENT = 10.0  # seconds from the first rank that comes to a bad first step to the last


class RankLost(Exception):
    """Some ranks did not answer in time."""


class Ranks:
    """The ranks that train one model, on a group of their own that never waits for a device.

    Cost: making it is one collective; each exchange is one more, on the host.
    """

    def __init__(self, members: list[int] | None = None, timeout: float = 600.0) -> None:
        self.timeout = timedelta(seconds=timeout)
        self.rank = dist.get_rank()
        everyone = list(range(dist.get_world_size()))
        self.members = sorted(members or everyone)
        self.size = len(self.members)
        some = self.members != everyone
        here = _store(f"joining/{self.members}")
        here.set(str(self.rank), "")
        try:
            self._group = dist.new_group(self.members if some else None, backend="gloo", timeout=self.timeout, use_local_synchronization=some)
        except RuntimeError as error:
            missing = ", ".join(str(m) for m in self.members if not here.check([str(m)]))
            raise RankLost(f"Ranks {missing} failed to come" if missing else _plain(error)) from error

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all of them."""
        return self.rank == self.members[0]

    def gather(self, value: T) -> list[T]:
        """Return every member's value, in the order of members; raise `RankLost` with those that are missing."""
        found: list[Any] = [None] * self.size
        try:
            dist.monitored_barrier(self._group, timeout=self.timeout, wait_all_ranks=True)
            dist.all_gather_object(found, value, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise RankLost(_plain(error)) from error
        return found

    def meet(self, seconds: float) -> None:
        """Wait until every member is here, or for so long."""
        with suppress(RuntimeError, ValueError):
            dist.monitored_barrier(self._group, timeout=min(self.timeout, timedelta(seconds=seconds)), wait_all_ranks=True)

    def total(self, numbers: list[float]) -> list[float]:
        """Add numbers over all members: one small all-reduce."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        try:
            dist.all_reduce(sums, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise RankLost(_plain(error)) from error
        return [float(v) for v in sums]


class Coming:
    """Whether all ranks step an optimizer: a group has to be made by all, and one that does not step (of a parameter server) never comes.

    A rank says so in the store of the job at its first step, and waits for nobody. What it has at the second was averaged over all of them in
    between, so all that step have said it by then. Where the first step is bad, it is bad on all of them, and they come in a moment.

    Cost: two words to the store, in the first two steps.
    """

    def __init__(self, name: str, members: tuple[int, ...]) -> None:
        self._store = _store(name)
        self._words = [str(member) for member in members]
        self._said = False
        self.all: bool | None = None  # not known yet

    def now(self, bad: Callable[[], bool]) -> bool:
        """At a step: whether all ranks of it can meet."""
        if self.all is None and self._said:
            self.all = self._same("second", self._store.check(self._words))
        elif self.all is None:
            here, self._said = bad(), True
            self._store.set(str(dist.get_rank()), "bad" if here else "finite")
            return here and self._same("first", self._all_bad())
        return bool(self.all)

    def _all_bad(self) -> bool:
        end = time.monotonic() + _MOMENT
        while not self._store.check(self._words):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return all(self._store.get(word) == b"bad" for word in self._words)

    def _same(self, when: str, here: bool) -> bool:
        """Return the answer of the rank that was the first to have one."""
        return bool(self._store.compare_set(when, "", "all" if here else "some") == b"all")


def _store(name: str) -> Any:
    """Return a part of the store of the job."""
    return dist.distributed_c10d.PrefixStore(f"whynan/{name}", dist.distributed_c10d._get_default_store())


def _plain(error: BaseException) -> str:
    """Return the first sentence of an error of the transport, without the source file it names."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[\S+\] ", "", line).split(". ")[0]
