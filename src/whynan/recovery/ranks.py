"""Agreement between the ranks of a job, on torch.distributed and nothing else.

Data parallel ranks step together, so they can also talk together at a step. Nothing here is called unless all of them do.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class RankLost(Exception):
    """Some ranks did not answer in time."""


class Ranks:
    """All ranks of the job, on a group of their own that never waits for a device.

    Cost: making it is one collective; each exchange is one more, on the host.
    """

    def __init__(self, timeout: float = 600.0) -> None:
        self.timeout = timedelta(seconds=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=self.timeout)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in the order of ranks; raise `RankLost` with those that are missing."""
        found: list[Any] = [None] * self.size
        try:
            dist.monitored_barrier(self._group, timeout=self.timeout, wait_all_ranks=True)
            dist.all_gather_object(found, value, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise RankLost(str(error).splitlines()[0]) from error
        return found

    def total(self, numbers: list[float]) -> list[float]:
        """Add numbers over all ranks: one small all-reduce."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        try:
            dist.all_reduce(sums, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise RankLost(str(error).splitlines()[0]) from error
        return [float(v) for v in sums]


def rank_here() -> int:
    """Return this process's rank, also before the process group is made (torchrun sets it)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def several() -> bool:
    """Whether a process group of more than one rank is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
