"""Which rank this process is. Does not import torch: the files of a run are written by modules that work without it."""

from __future__ import annotations

import os
import sys
from typing import Any

_last = 0  # known from a process group that is gone


def rank_here() -> int:
    """Return this process's rank, also before the process group is made (torchrun sets it) and when it is gone.

    >>> rank_here()
    0
    """
    global _last
    group: Any = _group()
    if group is not None:
        _last = int(group.get_rank())
        return _last
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdigit() else _last


def is_ranked() -> bool:
    """Whether anything says which rank this process is."""
    return _group() is not None or os.environ.get("RANK", "").isdigit()


def _group() -> Any:
    dist: Any = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
