"""Collectives that the program calls itself: what they gave is kept for the step, so that one rank can replay it alone.

A replay on one rank must never enter a collective: the others would not come. What torch calls for itself (fully_shard,
Join, communication hooks) is left alone: a replay goes around those.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling

from whynan.capsule.tape.facts import memory_of
from whynan.capsule.tape.nested import tensors_of
from whynan.capsule.unseen import leave_out, unseen

if TYPE_CHECKING:
    from whynan.capsule.doors.interception import Interception
    from whynan.capsule.recorder import Recorder

# name: which argument receives the result, and its position
_RECEIVES = {"all_reduce": ("tensor", 0), "broadcast": ("tensor", 0), "reduce": ("tensor", 0), "all_gather": ("tensor_list", 0),
             "all_gather_into_tensor": ("output_tensor", 0), "reduce_scatter_tensor": ("output", 0), "reduce_scatter": ("output", 0),
             "all_gather_single": ("output_tensor", 0), "reduce_scatter_single": ("output", 0), "all_reduce_coalesced": ("tensors", 0),
             "all_gather_coalesced": ("output_tensor_lists", 0), "recv_object_list": ("object_list", 0),
             "all_to_all": ("output_tensor_list", 0), "all_to_all_single": ("output", 0), "scatter": ("tensor", 0), "gather": ("gather_list", 1),
             "recv": ("tensor", 0), "irecv": ("tensor", 0), "all_gather_object": ("object_list", 0), "broadcast_object_list": ("object_list", 0),
             "gather_object": ("object_gather_list", 1), "scatter_object_list": ("scatter_object_output_list", 0)}  # fmt: skip
_IN_PLACE = ("all_reduce", "reduce", "broadcast", "all_reduce_coalesced")
_SILENT = ("barrier", "monitored_barrier", "send", "isend", "send_object_list")
COPY_LIMIT = 1 << 24  # bytes of a result that are copied; a larger one is kept by reference
LOOSE_LIMIT = 1 << 16  # the same where the tape itself knows the result


def several() -> bool:
    """Whether a process group of more than one rank is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Refused(RuntimeError):
    """A collective in the work of one rank alone."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} cannot be made by one rank alone")


class Kept:
    """What one collective gave, and whether this rank's own part in it was finite."""

    def __init__(self, name: str, given: list[torch.Tensor]) -> None:
        self.name = name
        self.values: list[Any] = []
        small = [t for t in given if t.is_floating_point() and t.numel() * t.element_size() <= COPY_LIMIT]
        self._mine = [torch.isfinite(t.detach()).all() for t in small] if len(small) == len(given) else []  # not read: no wait

    def came_from_others(self) -> bool:
        """Whether the result is bad although what this rank put in was not."""
        bad = any(isinstance(v, torch.Tensor) and v.is_floating_point() and not bool(torch.isfinite(v).all()) for v in self.values)
        return bad and bool(self._mine) and all(bool(flag) for flag in self._mine)


class Received:
    """What the collectives of the current step gave, by the entry of the tape that made them, in their order."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Kept]] = []
        self._next: dict[int | None, int] = {}
        self.places: set[int] = set()  # memory that they wrote to outside modules
        self._reduced: list[tuple[int, int]] = []  # memory and size of what was summed over all ranks
        self.refused = ""  # why one rank alone could not replay the step

    def clear(self) -> None:
        """Begin a new step."""
        self.kept.clear()
        self.places.clear()
        self._reduced.clear()
        self.refused = ""

    def rewind(self) -> None:
        """Begin a replay."""
        self._next = {}

    def keep(self, entry: int, kept: Kept, receiver: Any, limit: int) -> None:
        """Keep the result of a collective, as a copy where it is small."""
        tensors = list(tensors_of(receiver))
        kept.values = [_copy(t, limit) for t in tensors] if tensors else list(receiver) if isinstance(receiver, list) else []
        self.kept.append((entry, kept))

    def give(self, entry: int | None, name: str, receiver: Any) -> None:
        """Write the kept result into the receiver of the same collective in a replay of an entry, or of the whole step."""
        kept = [k for e, k in self.kept if entry is None or e == entry]
        number = self._next.get(entry, 0)
        if number >= len(kept) or kept[number].name != name:
            raise Refused(f"torch.distributed.{name}")
        self._next[entry] = number + 1
        targets = list(tensors_of(receiver))
        if not targets and isinstance(receiver, list):
            receiver[:] = kept[number].values
        with torch.no_grad():
            for target, value in zip(targets, kept[number].values, strict=False):
                target.copy_(value)

    def from_others(self) -> bool:
        """Whether a bad value came in from other ranks in this step. Reads the device."""
        return any(kept.came_from_others() for _, kept in self.kept)

    def note_sum(self, tensor: torch.Tensor) -> None:
        """Note that a tensor was summed over all ranks: it may be a gradient."""
        self._reduced.append((tensor.data_ptr(), tensor.numel()))

    def sums(self, gradients: list[torch.Tensor]) -> bool:
        """Whether the program itself summed these gradients over all ranks in this step: one by one, or all in one."""
        places, sizes = {p for p, _ in self._reduced}, {n for _, n in self._reduced}
        return bool(gradients) and (any(g.data_ptr() in places for g in gradients) or sum(g.numel() for g in gradients) in sizes)


def _copy(tensor: torch.Tensor, limit: int) -> torch.Tensor:
    small = tensor.numel() * tensor.element_size() <= limit
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
    for name in (*_RECEIVES, *_SILENT):
        original = getattr(dist, name, None)
        if original is not None:
            wrapper = _watched(interception.doors.recorder, name, original)
            interception.replace(dist, name, wrapper)
            if hasattr(dist.distributed_c10d, name):
                interception.replace(dist.distributed_c10d, name, wrapper)


@unseen
def _watched(recorder: Recorder, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(*args, **kwargs)
        try:
            if recorder.replays_here:
                return _replayed(recorder, name, args, kwargs)
            if not recorder.running or name not in _RECEIVES or _called_by_torch(sys._getframe(1).f_globals.get("__name__", "")):
                return recorder.suspended(original, *args, **kwargs)
            return _kept(recorder, name, original, args, kwargs)
        except BaseException:
            leave_out()
            raise

    return collective


def _called_by_torch(module: str) -> bool:
    return module.startswith("torch.") and not module.startswith("torch.distributed.nn")


def _receiver(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    argument, position = _RECEIVES[name]
    return kwargs.get(argument, args[position] if len(args) > position else None)


def _given(name: str, receiver: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    if name in _IN_PLACE:
        yield from tensors_of(receiver)
    for value in (*args, *kwargs.values()):
        if value is not receiver:
            yield from tensors_of(value)


@unseen
def _kept(recorder: Recorder, name: str, original: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    receiver = _receiver(name, args, kwargs)
    loose = recorder.here  # not inside a module or a function of autograd, which a replay calls again

    def call() -> Any:
        targets = list(tensors_of(receiver)) if loose else []
        for target in targets:
            recorder.tape.memory.about_to_change(target)
        kept = Kept(name, list(_given(name, receiver, args, kwargs)))
        result = original(*args, **kwargs)
        limit = 0 if result is not None else LOOSE_LIMIT if loose else COPY_LIMIT  # an asynchronous result is not there yet
        recorder.received.keep(recorder.entry_number() or 0, kept, receiver, limit)
        for target in targets:
            recorder.came_in(target)
            recorder.received.places.add(memory_of(target))
            if name == "all_reduce" and _of_all(kwargs.get("group", args[2] if len(args) > 2 else None)):
                recorder.received.note_sum(target)
        return result

    return recorder.suspended(call)


def _of_all(group: Any) -> bool:
    return group is None or group is dist.group.WORLD


def _replayed(recorder: Recorder, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    if name not in _SILENT:
        recorder.received.give(recorder.entry_number(), name, _receiver(name, args, kwargs))
    return _Done() if kwargs.get("async_op") or name.startswith("i") else None
