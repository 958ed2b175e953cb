"""Collectives that the program calls itself: what they gave is kept for the step, so that one rank can replay it alone.

A replay on one rank must never enter a collective: the others would not come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from whynan.capsule.tape import tensors_of

if TYPE_CHECKING:
    from whynan.capsule.intercept import Interception

# name: which argument receives the result
_RECEIVES = {"all_reduce": "tensor", "broadcast": "tensor", "all_gather": "tensor_list", "all_gather_into_tensor": "output_tensor",
             "reduce_scatter_tensor": "output", "reduce_scatter": "output", "all_to_all": "output_tensor_list",
             "all_to_all_single": "output", "all_gather_object": "object_list", "broadcast_object_list": "object_list"}  # fmt: skip
_SILENT = ("barrier", "monitored_barrier")
_OTHERS = ("send", "recv", "isend", "irecv", "gather", "scatter", "reduce", "gather_object", "scatter_object_list")
COPY_LIMIT = 1 << 24  # bytes of a result that are copied; a larger one is kept by reference


class Received:
    """What the collectives of the current step gave, in their order."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, list[Any]]] = []
        self._next = 0

    def clear(self) -> None:
        """Begin a new step."""
        self._kept.clear()

    def rewind(self) -> None:
        """Begin a replay."""
        self._next = 0

    def keep(self, name: str, receiver: Any) -> None:
        """Keep the result of a collective."""
        self._kept.append((name, [_copy(t) for t in tensors_of(receiver)] or list(receiver if isinstance(receiver, list) else [])))

    def give(self, name: str, receiver: Any) -> None:
        """Write the kept result into the receiver of the same collective in a replay."""
        if self._next >= len(self._kept) or self._kept[self._next][0] != name:
            raise RuntimeError(f"torch.distributed.{name} cannot be replayed by one rank alone")
        values = self._kept[self._next][1]
        self._next += 1
        targets = list(tensors_of(receiver))
        if not targets and isinstance(receiver, list):
            receiver[:] = values
        with torch.no_grad():
            for target, value in zip(targets, values, strict=False):
                target.copy_(value)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    small = tensor.numel() * tensor.element_size() <= COPY_LIMIT
    return tensor.detach().clone() if small else tensor.detach()


class _Done:
    """A finished asynchronous operation."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def watch_collectives(interception: Interception) -> None:
    """Stand at the collectives of torch.distributed."""
    if not dist.is_available():
        return
    for name in (*_RECEIVES, *_SILENT, *_OTHERS):
        original = getattr(dist, name, None)
        if original is not None:
            wrapper = _watched(interception, name, original)
            interception.replace(dist, name, wrapper)
            if hasattr(dist.distributed_c10d, name):
                interception.replace(dist.distributed_c10d, name, wrapper)


def _watched(interception: Interception, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    recorder = interception.doors.recorder
    receiver = _RECEIVES.get(name)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if recorder.replaying:
            return _replayed(recorder.received, name, receiver, args, kwargs)
        result = recorder.suspended(original, *args, **kwargs)
        if recorder.running and receiver is not None:
            target = kwargs.get(receiver, args[0] if args else None)
            if result is not None and hasattr(result, "wait"):
                result = _Waiting(result, lambda: recorder.received.keep(name, target))
            else:
                recorder.received.keep(name, target)
        return result

    return collective


def _replayed(received: Received, name: str, receiver: str | None, args: Any, kwargs: dict[str, Any]) -> Any:
    if name in _SILENT:
        return None
    received.give(name, kwargs.get(receiver or "", args[0] if args else None))
    return _Done() if kwargs.get("async_op") else None


class _Waiting:
    """An asynchronous operation whose result is kept when it is waited for."""

    def __init__(self, work: Any, finished: Callable[[], None]) -> None:
        self._work, self._finished = work, finished

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        done = self._work.wait(*args, **kwargs)
        self._finished()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
