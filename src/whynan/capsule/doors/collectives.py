"""Collectives that the program calls itself: what they gave is kept for the step, so that one rank can replay it alone.

A replay on one rank must never enter a collective: the others would not come. What torch calls for itself (fully_shard,
Join, communication hooks) is left alone: a replay goes around those.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import CodeType
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
_TELLING = 3  # values that say of two tensors whether one is a multiple of the other
_MOST_RUNS = 256  # places where a bucket may begin
COPY_LIMIT = 1 << 24  # bytes of a result that are copied; a larger one is kept by reference
LOOSE_LIMIT = 1 << 16  # the same where the tape itself knows the result


def several() -> bool:
    """Whether a process group of more than one rank is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


Caller = tuple[CodeType, int]  # and the line


class Refused(RuntimeError):
    """A collective in the work of one rank alone."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} cannot be made by one rank alone")


class Kept:
    """What one collective gave, and whether this rank's own part in it was finite."""

    def __init__(self, name: str, given: list[torch.Tensor], caller: Caller, tells: bool) -> None:
        self.name, self.caller, self.tells = name, caller, tells
        self.values: list[Any] = []
        small = [t for t in given if t.is_floating_point() and t.numel() * t.element_size() <= COPY_LIMIT]
        self._mine = [torch.isfinite(t.detach()).all() for t in small] if len(small) == len(given) else []  # not read: no wait

    def came_from_others(self) -> bool:
        """Whether the result is bad although what this rank put in was not."""
        return self._is_bad() and bool(self._mine) and all(bool(flag) for flag in self._mine)

    def came_from_here(self) -> bool:
        """Whether the result is bad, and what this rank put in was, too."""
        return self._is_bad() and not all(bool(flag) for flag in self._mine)

    def _is_bad(self) -> bool:
        return any(isinstance(v, torch.Tensor) and v.is_floating_point() and not bool(torch.isfinite(v).all()) for v in self.values)

    def sums(self) -> Iterator[torch.Tensor]:
        """Yield what may be a sum over all ranks: a result, what was gathered, added up or one part behind the other."""
        given = [v.flatten() for v in self.values if isinstance(v, torch.Tensor) and v.is_floating_point()] if self.tells else []
        if given and "gather" in self.name:
            whole, ranks = torch.cat(given), dist.get_world_size()
            yield from (whole, whole.view(ranks, -1).sum(0)) if whole.numel() % ranks == 0 else (whole,)
        else:
            yield from given

    def averages(self, gradients: list[torch.Tensor]) -> bool:
        """Whether some of the gradients are what all ranks gave, summed up, or a multiple of that. Reads the device."""
        return any(_is_multiple(made, flat) for made in self.sums() if made.numel() >= _TELLING for flat in _runs(gradients, made.numel()))


class Received:
    """What the collectives of the current step gave, by the entry of the tape that made them, in their order."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, Kept]] = []
        self._next: dict[int | None, int] = {}
        self.places: set[int] = set()  # memory that they wrote to outside modules
        self._reduced: list[torch.Tensor] = []  # what was summed over all ranks; held, so that nothing else gets its memory
        self._averaging: set[Caller] = set()  # who sums gradients
        self.own: set[int] = set()  # the entries that made what this rank gave, outside modules
        self.refused = ""  # why one rank alone could not replay the step

    def clear(self, since: int | None = None) -> None:
        """Begin a new step; it has what calls `since` an entry were given, where its calls are on the tape already."""
        self.kept = [(entry, kept) for entry, kept in self.kept if since is not None and entry > since]
        self.own = {entry for entry in self.own if since is not None and entry > since}
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

    def next(self, entry: int | None, name: str) -> Kept:
        """Return what the same collective gave, in a replay of an entry, or of the whole step."""
        kept = [k for e, k in self.kept if (entry is None or e == entry) and k.caller not in self._averaging]
        number = self._next.get(entry, 0)
        if number >= len(kept) or kept[number].name != name:
            raise Refused(f"torch.distributed.{name}")
        self._next[entry] = number + 1
        return kept[number]

    def from_others(self) -> bool:
        """Whether a bad value came in from other ranks in this step. Reads the device."""
        return any(kept.came_from_others() for _, kept in self.kept)

    def note_sum(self, tensor: torch.Tensor) -> None:
        """Note that a tensor was summed over all ranks: it may be a gradient."""
        self._reduced.append(tensor)

    def forget_sums(self) -> None:
        """Let go of what was summed before the first backward pass of a step: no gradients (weights that begin alike)."""
        self._reduced.clear()

    def sums(self, gradients: list[torch.Tensor]) -> bool:
        """Whether the program itself summed these gradients over all ranks in this step: one by one, or all in one. Reads the device."""
        gradients = [g.detach() for g in gradients if g.layout is torch.strided]
        self._averaging |= (made := self._callers(gradients))
        places, sizes = {t.data_ptr() for t in self._reduced}, {t.numel() for t in self._reduced if t.numel() >= _TELLING}
        return bool(made) or any(g.data_ptr() in places for g in gradients) or sum(g.numel() for g in gradients) in sizes

    def _callers(self, gradients: list[torch.Tensor]) -> set[Caller]:
        found: set[Caller] = set()
        for _, kept in self.kept:
            if kept.caller not in found and kept.averages(gradients):
                found.add(kept.caller)
        return found

    def averages(self, caller: Caller) -> bool:
        """Whether gradients are summed over the ranks there: a replay is to have those of its own rank."""
        return caller in self._averaging


def _runs(gradients: list[torch.Tensor], size: int) -> Iterator[torch.Tensor]:
    """Yield gradients that stand side by side and have so many values together, as a bucket holds them: in their order, and from the last."""
    first, held, found = 0, 0, 0
    for last, gradient in enumerate(gradients):
        held += gradient.numel()
        while held > size:
            held -= gradients[first].numel()
            first += 1
        if held == size and found < _MOST_RUNS:
            found += 1
            run = [g.flatten() for g in gradients[first : last + 1]]
            yield from (torch.cat(run), torch.cat(run[::-1])) if len(run) > 1 else run


def _is_multiple(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors differ by a factor: no accident where enough of their values are not 0."""
    halves = any(torch.finfo(t.dtype).bits < 32 for t in (one, other))
    a, b = one.detach().double(), other.double()
    if int(((a != 0) & (b != 0)).sum()) < _TELLING:
        return False
    return bool((a @ b).abs() >= (1 - (1e-4 if halves else 1e-9)) * a.norm() * b.norm())


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
            frame = sys._getframe(1)
            caller = (frame.f_code, frame.f_lineno)
            if recorder.replays_here:
                return _replayed(recorder, name, args, kwargs, caller)
            if not recorder.running or name not in _RECEIVES or _called_by_torch(frame.f_globals.get("__name__", "")):
                return recorder.suspended(original, *args, **kwargs)
            return _kept(recorder, name, original, args, kwargs, caller)
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
def _kept(recorder: Recorder, name: str, original: Callable[..., Any], args: Any, kwargs: dict[str, Any], caller: Caller) -> Any:
    receiver, of_all = _receiver(name, args, kwargs), _of_all((*args, *kwargs.values()))
    loose = recorder.here  # not inside a module or a function of autograd, which a replay calls again

    def call() -> Any:
        targets = list(tensors_of(receiver)) if loose else []
        for target in targets:
            recorder.tape.memory.about_to_change(target)
        given = list(_given(name, receiver, args, kwargs))
        recorder.received.own.update(slot.entry for t in given if loose and (slot := recorder.tape.slot_of(t)) is not None)
        kept = Kept(name, given, caller, of_all and _is_of_others(name, args, kwargs))
        result = original(*args, **kwargs)
        limit = 0 if result is not None else LOOSE_LIMIT if loose else COPY_LIMIT  # an asynchronous result is not there yet
        recorder.received.keep(recorder.entry_number() or 0, kept, receiver, limit)
        for target in targets:
            recorder.came_in(target)
            recorder.received.places.add(memory_of(target))
            if name == "all_reduce" and of_all:
                recorder.received.note_sum(target)
        return result

    return recorder.suspended(call)


def _is_of_others(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether what this rank has after a collective says what others gave: who sends keeps its own."""
    named = [kwargs[end] for end in ("src", "dst", "group_src", "group_dst") if kwargs.get(end) is not None]
    end = [*named, *args[2 if name == "gather" else 1 :][:1], 0][0]
    if name in ("reduce", "gather"):
        return bool(end == dist.get_rank())
    return name.startswith(("all_reduce", "all_gather")) or (name == "broadcast" and end != dist.get_rank())


def _of_all(arguments: tuple[Any, ...]) -> bool:
    """Whether the group of a collective is that of all ranks."""
    return all(group.size() == dist.get_world_size() for group in arguments if isinstance(group, dist.ProcessGroup))


def _replayed(recorder: Recorder, name: str, args: Any, kwargs: dict[str, Any], caller: Caller) -> Any:
    if name not in _SILENT:
        receiver = _receiver(name, args, kwargs)
        kept = None if recorder.received.averages(caller) else recorder.received.next(recorder.entry_number(), name)
        if kept is None or (name.startswith("all_reduce") and kept.came_from_here()):
            _give_own(name, receiver, args, kwargs)
        else:
            _give(kept, receiver)
    return _Done() if kwargs.get("async_op") or name.startswith("i") else None


def _give(kept: Kept, receiver: Any) -> None:
    """Write the kept result into the receiver of a collective."""
    targets = list(tensors_of(receiver))
    if not targets and isinstance(receiver, list):
        receiver[:] = kept.values
    with torch.no_grad():
        for target, value in zip(targets, kept.values, strict=False):
            target.copy_(value)


def _give_own(name: str, receiver: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Do what a collective does as if all ranks gave the same: a sum of gradients stands for this rank's own, and a bad value of its own is followed."""
    own = next((t for t in _given(name, receiver, args, kwargs)), None)
    with torch.no_grad():
        for target in tensors_of(receiver):
            if name.startswith("all_gather") and own is not None:
                target.copy_(own.flatten().repeat(target.numel() // own.numel()).view_as(target))
            elif name.startswith("all_reduce") and kwargs.get("op", args[1] if len(args) > 1 else dist.ReduceOp.SUM) == dist.ReduceOp.SUM:
                target.mul_(dist.get_world_size())
