"""Which rank this process is. Does not import torch: the files of a run are written by modules that work without it."""

from __future__ import annotations

import os
import sys
from typing import Any


def rank_here() -> int:
    """Return this process's rank, also before the process group is made (torchrun sets it).

    >>> rank_here()
    0
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0
