"""Refuse collectives while one rank works alone: the others would not come, and it would wait for them without an end.

Whatever calls them (a wrapper that nobody knew of, distributed tensors, a reducer in C++), all of them are operations of torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode

from whynan.capsule.doors.collectives import Refused, several

_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem")
_LOCAL = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")


def refused_collectives() -> AbstractContextManager[object]:
    """Raise `Refused` where this thread calls a collective.

    Cost: some microseconds for each operation, in a replay; nothing where there is one process.
    """
    return _Refusing() if several() else nullcontext()  # type: ignore[no-untyped-call]


class _Refusing(TorchDispatchMode):
    """Sees each operation of this thread, also those of the wrappers that torch brings."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return func(*args, **(kwargs or {}))
        if any(getattr(cls, "__module__", "").startswith("torch.distributed.tensor") for cls in types):
            return NotImplemented  # a distributed tensor says first which operations it is made of
        if func.namespace in _SPACES and func._opname not in _LOCAL and _with_others(args):
            raise Refused(str(func))
        return func(*args, **(kwargs or {}))


def _with_others(args: Any) -> bool:
    """Whether the group of a collective has other ranks; one that is not found may have."""
    for value in args:
        group = _group_of(value)
        if group is not None:
            return bool(group.size() > 1)
    return True


def _group_of(value: Any) -> Any:
    try:
        if isinstance(value, str):
            groups: Any = dist.distributed_c10d
            return groups._resolve_process_group(value)
        return dist.ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else None
    except (RuntimeError, LookupError, TypeError):  # another text, or another object
        return None
