"""Agreement between the ranks of a job, on torch.distributed and nothing else.

Data parallel ranks step together, so they can also talk together at a step. Nothing here is called unless all of them do.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


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
        self._group = dist.new_group(self.members if some else None, backend="gloo", timeout=self.timeout, use_local_synchronization=some)

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


def _plain(error: BaseException) -> str:
    """Return the first sentence of an error of the transport, without the source file it names."""
    line = next(iter(str(error).splitlines()), type(error).__name__)
    return re.sub(r"^\[\S+\] ", "", line).split(". ")[0]
