"""What a program carries from step to step in tensors of its own: put back where the step that moved it is dropped.

A recurrent state, a moving average, a prior. Nobody but the program knows them, and a bad step poisons them for all steps after it.
Where the next step reads something that the dropped one made, that tensor is given the value which the dropped step itself read at that
line. What the loop still does about the dropped step after its update is left alone until the next step reads the outcome, and writes
in place from the dropped step's forward pass are undone, or left out.

    state = state.detach()              # the step after the dropped one reads what that one made: it is given what that one read here
    out, state = net(x, state)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from whynan.capsule.recorder import Recorder
from whynan.capsule.replay import Program
from whynan.capsule.sites import Site, is_internal
from whynan.capsule.tape.entries import Entry, Inner, Outside, Slot, dependencies, target_of
from whynan.capsule.tape.facts import bytes_of, is_leaf, is_released, memory_of, version_of
from whynan.capsule.tape.memory import READ_LIMIT, WRITE_LIMIT
from whynan.capsule.tape.nested import tensors_of
from whynan.capsule.tape.tape import Tape
from whynan.tripwire.values import damage_of

_Place = tuple[int, bool, int, int]  # the number of a site, with gradients or without, how often it was passed before, and which of the tensors read there
_Read = Slot | Inner | Outside
_Key = Slot | Inner | int  # a tensor that was read, one from outside by its number
_Known = tuple[torch.Tensor, int, _Key]  # a value that was read, its version, and whose it was


class DroppedStep:
    """What a dropped step was made of, until the two steps after it are over."""

    def __init__(self, recorder: Recorder, say: Callable[[], None]) -> None:
        self._tape = tape = recorder.tape
        self._say = say  # that something of the program's own is put back
        self._first = recorder.roots.beginning.start
        self._where = _stack()
        self._age = 0  # steps since
        self._next = False  # the step after it has begun
        self._passed: dict[tuple[int, bool], int] = {}
        entries = sorted((entry for entry in (*tape, *tape.cut) if entry.number > self._first), key=lambda entry: entry.number)
        self.made = _of_forward_pass(entries)  # the numbers of the entries whose results would not be there without this batch
        self._history: dict[int, tuple[list[_Key], bool]] = {e.number: ([tape.key_of(r) for r in e.reads], e.needs_grad) for e in entries}
        self.made -= self._prepared(entries)
        self._values = _values_read(recorder, entries, self.made)
        self._write_back(recorder)

    def _prepared(self, entries: list[Entry]) -> set[int]:
        """Return the writes to older tensors from before anything that is trained was computed: a rollout, which later steps read too. Bad ones are damage."""
        begun = min((entry.number for entry in entries if entry.needs_grad), default=0)
        writes = [entry for entry in entries if entry.kind == "write" and entry.number < begun and entry.number in self.made]
        return {e.number for e in writes if (target := _target_tensor(e, self._tape)) is not None and not damage_of(target.detach())}

    def goes_on(self) -> bool:
        """A step ends: the dropped one itself, perhaps that of another optimizer in the same turn of the loop, then the steps after it."""
        self._age += self._next
        self._next = False
        self._passed.clear()
        return self._age < 2

    def puts_back(self, site: Site | None, number: int, reads: Sequence[_Read], grad: bool, args: Any) -> bool:
        """A call is about to be made: put back what it reads of the dropped step; return whether something was."""
        key = (id(site), grad)
        passed = self._passed[key] = self._passed.get(key, -1) + 1
        poisoned = [(place, read) for place, read in enumerate(reads) if self._tape.maker_of(read) in self.made]
        after = not self._next and self._age == 0 and bool(reads) and _is_after(self._where)
        self._next = self._next or (bool(reads) and not after)
        if after:
            self._history[number] = [self._tape.key_of(read) for read in reads], False
        if after and poisoned and not _sets_one_element(args, next(iter(args), None)):
            self.made.add(number)
        done = False
        for place, read in enumerate(reads):
            if (place, read) in poisoned:
                done = (not after and self._put_back(read, self._values.get((*key, passed, place)))) or done
            elif self._age == 0 and isinstance(read, Outside) and _is_value(read) and bytes_of(read.tensor) <= WRITE_LIMIT:
                self._values[*key, passed, place] = _kept(read.value(), self._tape.key_of(read))
        if done:
            self._passed[key] -= 1  # it is noted once more
        return done

    def _put_back(self, read: _Read, known: _Known | None) -> bool:
        tensor = read.tensor if isinstance(read, Outside) else self._tape.alive(read) if isinstance(read, Slot) else None
        if tensor is None or known is None or version_of(known[0]) != known[1] or self._is_others(read, tensor):
            return False
        if known[0].shape != tensor.shape or known[0].dtype is not tensor.dtype or not self._replaces(read, tensor, known[2]):
            return False
        return self._put(tensor, known[0])

    def _put(self, tensor: torch.Tensor, value: torch.Tensor) -> bool:
        """Give a tensor the value it had; return whether it could be: not where several of its elements are one place in memory."""
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction(), torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]  # a graph may hold it
                tensor.detach().copy_(value)
        except RuntimeError:
            return False
        self._tape.forget(tensor)  # from here on a plain value
        self._say()
        return True

    def _replaces(self, read: _Read, tensor: torch.Tensor, old: _Key) -> bool:
        """Whether a tensor stands for one that the dropped step read at its place: computed from it, or a bad result of the model.

        Another may be there by the order of things: a batch that was prepared one step ahead, a feature of another sample.
        """
        todo, seen, trained = [self._tape.maker_of(read)], set[int](), False
        while todo:
            number = todo.pop()
            keys, needs_grad = self._history.get(number, ([], False))
            if old in keys:
                return True
            trained = trained or needs_grad
            seen.add(number)
            todo += {key.entry for key in keys if not isinstance(key, int)} - seen
        return trained and tensor.numel() > 1 and bool(damage_of(tensor.detach()))  # a single number is more often a loss that is kept for the log

    def _is_others(self, read: _Read, tensor: torch.Tensor) -> bool:
        """Whether a tensor lives in memory that was there before the dropped step: `x.to(state)` gives back `x` itself."""
        maker = self._tape.entries.get(self._tape.maker_of(read))
        place = memory_of(tensor)
        return maker is not None and any(
            isinstance(r, Outside) and memory_of(r.tensor) == place and self._tape.maker_of(r) not in self.made for r in maker.reads
        )

    def leaves_out(self, target: torch.Tensor, sources: Any) -> bool:
        """Whether a write is left out: of something of the dropped step, after its update, to something older; what was done to it for that write is undone."""
        if (
            self._next
            or self._age
            or (target.requires_grad and is_leaf(target))
            or (any(s is target for s in sources[:1]) and _sets_one_element(sources, target))
        ):
            return False
        if not any(self._tape.maker_of(Outside(source, 0)) in self.made for source in tensors_of(sources) if source is not target):
            return False
        slot: object = self._tape.slot_of(target)
        while isinstance(slot, Slot) and (maker := self._tape.entries.get(slot.entry)) is not None and maker.kind == "write":
            slot = target_of(maker)
        if (isinstance(slot, Slot) and slot.entry > self._first) or not _is_after(self._where):
            return False
        for kept in self._tape.memory.written(self._tape.rolled):
            if kept.tensor is target and kept.saved is not None:
                self._put(target, kept.saved)
        return True

    def _write_back(self, recorder: Recorder) -> None:
        """Undo what was written in place from the forward pass; weights and buffers are others' affair."""
        tape = self._tape
        writes = [entry for entry in tape if entry.kind == "write" and entry.number in self.made]
        found = {entry.number: (entry, target) for entry in writes if (target := _target_tensor(entry, tape)) is not None}
        targets = {number: target for number, (entry, target) in found.items() if entry.kwargs or not _sets_one_element(entry.args, target)}
        places = {memory_of(target) for target in targets.values()}
        state = {memory_of(t) for root in recorder.roots.modules() for t in (*root.parameters(), *root.buffers())}
        for kept in tape.memory.written(self._first):
            tensor = kept.tensor
            if kept.saved is None or tensor.requires_grad or memory_of(tensor) in state:
                continue
            if memory_of(tensor) in places:
                self._put(tensor, kept.saved)
        begun = {entry.number: slot for entry in writes if entry.number in targets and (slot := self._unwritten(entry)) is not None}
        values = _values_of(recorder, set(begun.values()))
        for number, slot in begun.items():
            if slot in values:
                self._put(targets[number], values[slot])

    def _unwritten(self, entry: Entry) -> Slot | None:
        """Return what a tensor was before the forward pass wrote to it, where this step has made it: in the first one of a program."""
        slot, first = target_of(entry), min(self.made)
        while isinstance(slot, Slot) and slot.entry >= first and (maker := self._tape.entries.get(slot.entry)) is not None and maker.kind == "write":
            slot = target_of(maker)
        return slot if isinstance(slot, Slot) and self._first < slot.entry < first else None


def _of_forward_pass(entries: Iterable[Entry]) -> set[int]:
    """Return the numbers of the entries that compute with a model or its gradients, and of those that read their results."""
    found: set[int] = set()
    for entry in entries:
        if entry.runs_model or entry.needs_grad or (found and entry.kind in ("grad", "clip")) or not found.isdisjoint(dependencies(entry)):
            found.add(entry.number)
    return found


def _sets_one_element(args: Any, target: Any) -> bool:
    """Whether a write sets one element of a tensor (`losses[step] = loss`): what the program writes down about its steps stays as it wrote it."""
    index = args[1] if len(args) == 3 else None
    places = (index,) if isinstance(index, int) else index if isinstance(index, tuple) else ()
    return isinstance(target, torch.Tensor) and target.dim() > 0 and len(places) == target.dim() and all(isinstance(place, int) for place in places)


def _values_read(recorder: Recorder, entries: list[Entry], made: set[int]) -> dict[_Place, _Known]:
    """Return what the calls of a step have read, but for weights and what the step made of its batch, by their places."""
    tape = recorder.tape
    found: dict[_Place, tuple[torch.Tensor | Slot, _Read]] = {}
    passed: dict[tuple[int, bool], int] = {}
    for entry in entries:
        key = (id(entry.site), entry.grad_enabled)
        passed[key] = passed.get(key, -1) + 1
        for place, read in enumerate(entry.reads):
            if isinstance(read, Outside):
                if _is_value(read):
                    found[*key, passed[key], place] = read.value(), read
            elif read.entry <= tape.rolled:
                if (tensor := tape.brought.get(read)) is not None:
                    found[*key, passed[key], place] = tensor, read
            elif isinstance(read, Slot) and read.entry < min(made, default=0):
                found[*key, passed[key], place] = read, read
    values = _values_of(recorder, {held for held, _ in found.values() if isinstance(held, Slot)})
    tensors = {place: (held if isinstance(held, torch.Tensor) else values.get(held), read) for place, (held, read) in found.items()}
    return {place: _kept(t, tape.key_of(read)) for place, (t, read) in tensors.items() if t is not None and bytes_of(t) <= READ_LIMIT}


def _kept(tensor: torch.Tensor, key: _Key) -> _Known:
    """Keep a value: a small one as a copy, a large one as it is, with its version."""
    with torch._C.DisableTorchFunction():
        held = tensor.detach().clone() if bytes_of(tensor) <= WRITE_LIMIT else tensor.detach()
    return held, version_of(held), key


def _is_value(read: Outside) -> bool:
    """Whether what was read is no weight, and still there."""
    return not read.changed and not is_released(read.value()) and not (read.tensor.requires_grad and is_leaf(read.tensor))


def _values_of(recorder: Recorder, slots: set[Slot]) -> dict[Slot, torch.Tensor]:
    """Compute again what a step made before its forward pass."""
    if not slots:
        return {}
    program = Program(recorder, recorder.tape.needed_for({slot.entry for slot in slots}), [])
    with program.still():
        run = program.play()
    return {slot: run.made[slot].detach() for slot in slots if slot in run.made}


def _target_tensor(entry: Entry, tape: Tape) -> torch.Tensor | None:
    target = target_of(entry)
    return target.tensor if isinstance(target, Outside) else tape.alive(target) if isinstance(target, Slot) else None


def _stack() -> list[tuple[CodeType, int]]:
    """Return where the program is: its functions and lines, from the outermost."""
    frame: FrameType | None = sys._getframe(1)
    found = []
    while frame is not None:
        if not is_internal(frame.f_code):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found[::-1]


def _is_after(before: list[tuple[CodeType, int]]) -> bool:
    """Whether the program has gone on from a place, and not around its loop: in the innermost function that both have in common it is further down.

    A loop that comes around is at an earlier line. On one and the same line, or in another function, it is not known and taken for a new turn.
    """
    for (code, line), (code_now, line_now) in zip(before, _stack(), strict=False):
        if code is not code_now:
            return False
        if line != line_now:
            return line_now > line
    return False
