"""The tape: one step written down as the calls that make it up.

An entry is one call made outside every module (loss code, clipping, `backward`) or one outermost module call. Arguments
are kept by reference; a tensor that an earlier entry made is kept as a *slot* and made again on replay, so large
intermediates are not held. Nothing inside a module is written down: the replay finds it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from whynan.capsule.tape.entries import Carried, Entry, Inner, Made, Outside, Slot, dependencies, target_of
from whynan.capsule.tape.facts import bytes_of, is_leaf, memory_of
from whynan.capsule.tape.inside import Inside
from whynan.capsule.tape.memory import WRITE_LIMIT, Memory
from whynan.capsule.tape.needs import needed_for
from whynan.capsule.tape.nested import tensors_of

IDLE = 64  # calls without gradients after which the tape looks which of them can be forgotten
STALE = 256  # slots, above which they are looked through for those that are gone
HELD_LIMIT = 64 << 20  # or bytes of tensors they read

_is_grad_enabled = torch.is_grad_enabled


class Tape:
    """The entries of the current optimizer step (and what is still alive of earlier ones).

    Cost: about 3 µs per entry and a weak reference per tensor made.
    """

    def __init__(self, limit: int = 20_000) -> None:
        self.entries: dict[int, Entry] = {}
        self.limit = limit
        self.overflowed = False
        self.last = 0  # the newest number handed out
        self.rolled = self._before = 0  # the numbers at which the present step and the one before it began
        self._stale = STALE
        self._slots: dict[int, Made] = {}
        self._outside: dict[int, Outside] = {}
        self._patience = IDLE  # how many of these until the next look: as many as were kept at the last one, so that looking stays cheap
        self._idle = 0  # entries made without gradients since the last look whether anybody can still use them
        self._held = 0  # bytes of outside tensors met since then
        self.forgets = False  # it is known where a step begins: an optimizer ends it
        self.cut: list[Entry] = []  # calls of this step that are not kept
        self.brought: dict[Slot | Inner, torch.Tensor] = {}  # the values of those results of earlier steps that this one reads with their history
        self.carries = False  # the program has computed with something that the step before had made
        self.dropped: Carried | None = None  # the step before this one, where it was dropped
        self.numbers: list[Slot] = []  # the calls of this step that read a bad number out of a tensor
        self.inside = Inside(self)
        self.memory = Memory(self)
        self._unfiled = self.memory.unfiled  # the same list, at hand where a tensor is met

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def number(self) -> int:
        """Hand out the next entry number; numbers never repeat."""
        self.last += 1
        return self.last

    def add(self, entry: Entry, result: object, cuts: bool = False) -> None:
        """Append an entry and register the tensors of its result.

        A call that `cuts` a value off from its history (`state.detach()`) is not kept where that history begins in an earlier step: the
        value is taken as it is, or the tape would hold all steps of the run.
        """
        if len(self.entries) >= self.limit:
            self._make_room()
        for read in entry.reads:
            if type(read) is not Outside and (read.entry <= self.rolled or self._reaches_back(read.entry)):  # type: ignore[union-attr]
                entry.reaches_back = True
        if entry.reaches_back and self.forgets and (cuts or not entry.grad_enabled):
            self.cut.append(entry)
        else:
            self.entries[entry.number] = entry
        if isinstance(result, torch.Tensor):
            made = self._slots[id(result)] = Made(result)
            made.slot = Slot(entry.number, 0)
            entry.refs, entry.outputs, entry.needs_grad = (made,), 1, result.requires_grad
        elif result is not None:
            entry.refs = refs = []
            for tensor in tensors_of(result):
                made = self._slots[id(tensor)] = Made(tensor)
                made.slot = Slot(entry.number, entry.outputs)
                refs.append(made)
                entry.outputs += 1
                entry.needs_grad = entry.needs_grad or tensor.requires_grad
        if not entry.needs_grad and not entry.grad_enabled:
            self._idle += 1
            if self._idle >= self._patience or self._held > HELD_LIMIT:
                self.prune()

    def _reaches_back(self, number: int) -> bool:
        entry = self.entries.get(number)
        return entry is not None and entry.reaches_back

    def made_by(self, tensor: torch.Tensor) -> Slot | None:
        """Return the slot that made this very tensor object, if one did; its entry may be forgotten."""
        made = self._slots.get(id(tensor))
        return made.slot if made is not None and made() is tensor else None

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """Return the same, if its entry is there."""
        slot = self.made_by(tensor)
        return slot if slot is not None and slot.entry in self.entries else None

    def made_before(self, tensor: torch.Tensor) -> bool:
        """Whether the step before this one made this tensor: the program carries it from step to step."""
        slot = self.made_by(tensor)
        return slot is not None and self._before < slot.entry <= self.rolled

    def alive(self, slot: Slot) -> torch.Tensor | None:
        """Return the tensor of a slot while the program still holds it."""
        entry = self.entries.get(slot.entry)
        return entry.refs[slot.index]() if entry is not None and slot.index < len(entry.refs) else None

    def drop_unless_trained(self, first: int) -> None:
        """Drop the entries of a hook that trained nothing: they belong to the module call they were made in."""
        made = [e for n, e in self.entries.items() if n > first]
        if not any(e.kind in ("backward", "derivative", "optimizer", "clip", "zero") for e in made):
            for entry in made:
                del self.entries[entry.number]

    def forget(self, tensor: torch.Tensor) -> None:
        """Let a tensor count as made outside from here on."""
        self._slots.pop(id(tensor), None)

    def forget_memory(self, tensor: torch.Tensor) -> None:
        """Let a tensor and all that share its memory count as made outside from here on."""
        place = memory_of(tensor)
        for made in list(self._slots.values()):
            other = made()
            if other is not None and memory_of(other) == place:
                self.forget(other)

    def refer(self, tensor: torch.Tensor) -> Slot | Inner | Outside:
        """Say how to get this tensor again."""
        key = id(tensor)
        made = self._slots.get(key)
        try:
            trained = tensor.requires_grad
            computed = trained and not tensor.is_leaf  # asked without making an object of its node
        except RuntimeError:  # see `node_of`
            trained = computed = False
        if made is not None and made() is tensor:
            slot = made.slot
            earlier = slot.entry <= self.rolled
            # a leaf is state, whoever made it: gradients end in it. A plain value of an earlier step is taken as it is: a moving
            # average would hold the tape of all steps before it
            if (computed if trained else not earlier) and slot.entry in self.entries:
                if earlier:
                    self.brought[slot] = tensor.detach()
                return slot
        if computed and (inner := self.inside.find(tensor)) is not None:
            if inner.entry <= self.rolled:
                self.brought[inner] = tensor.detach()
            return inner
        known = self._outside.get(key)
        try:
            version = tensor._version
        except RuntimeError:  # see `version_of`
            version = -1
        if known is not None and known.tensor is tensor and version == known.version and not (trained and known.written):  # `.data` moves no version
            return known
        self._outside[key] = outside = Outside(tensor, version)
        self._unfiled.append(outside)
        if made is not None and made() is tensor:
            outside.carried = True
            self.carries = self.carries or (made.slot.entry > self._before and _is_state(tensor))
        if not trained and not _is_grad_enabled():
            self._held += bytes_of(tensor)
        return outside

    def maker_of(self, read: Slot | Inner | Outside) -> int:
        """Return the number of the entry that made what was read, also where it is taken as a plain value; 0 where none did."""
        key = self.key_of(read)
        return 0 if isinstance(key, int) else key.entry

    def is_write_from_outside(self, slot: Slot) -> bool:
        """Whether a result is a tensor from outside that a call wrote into."""
        entry = self.entries.get(slot.entry)
        return entry is not None and entry.kind == "write" and isinstance(target_of(entry), Outside)

    def key_of(self, read: Slot | Inner | Outside) -> Slot | Inner | int:
        """Tell tensors that were read apart: by what made them, else by their number."""
        if not isinstance(read, Outside):
            return read
        made = self._slots.get(id(read.tensor))
        return made.slot if made is not None and made() is read.tensor else id(read.tensor)

    def made_leaves(self) -> list[tuple[Slot, torch.Tensor]]:
        """Return the tensors that calls made, not only wrote to, and that gradients end in, in order."""
        made = [(ref.slot, tensor) for ref in self._slots.values() if (tensor := ref()) is not None and tensor.requires_grad and is_leaf(tensor)]
        calls = [m for m in made if (entry := self.entries.get(m[0].entry)) is not None and entry.kind == "call"]
        return sorted(calls, key=lambda m: m[0].entry)

    def prune(self) -> None:
        """Forget calls made without gradients whose results are gone: a validation loop must not hold on to its batches."""
        self._idle = self._held = 0
        del self.cut[next((i for i, entry in enumerate(self.cut) if i >= IDLE or _is_large(entry)), len(self.cut)) :]  # from the end: they are counted
        keep: set[int] = set()
        read_later: set[int] = set()
        for number in reversed(self.entries):
            entry = self.entries[number]
            if number in keep or not _unused(entry, read_later):
                keep.add(number)
                keep.update(dependencies(entry))
                read_later.update(id(leaf.tensor) for leaf in entry.reads if isinstance(leaf, Outside))
        self._patience = max(IDLE, len(keep))
        if len(keep) < len(self.entries):
            self.entries = {n: e for n, e in self.entries.items() if n in keep}
            self._slots = {i: made for i, made in self._slots.items() if made.slot.entry in keep}
            read = {id(leaf.tensor): leaf for e in self.entries.values() for leaf in e.reads if isinstance(leaf, Outside)}
            self._outside = {key: outside for key, outside in self._outside.items() if key in read}
            self.memory.clear()
            self._unfiled += read.values()

    def roll(self) -> None:
        """Begin a new step: forget everything that nothing alive depends on."""
        needed: set[int] = set()
        keep: list[Entry] = []
        self._before, self.rolled = self.rolled, self.last
        self.memory.clear()
        unfiled = self._unfiled
        for entry in reversed(self.entries.values()):
            if entry.number in needed or (entry.needs_grad and _alive(entry.refs)):  # nothing holds on to a backward pass: it makes no tensor
                keep.append(entry)
                for read in entry.reads:
                    if type(read) is Outside:
                        unfiled.append(read)  # what is kept may still be written to
                    else:
                        needed.add(read.entry)  # type: ignore[union-attr]
        self.entries = {entry.number: entry for entry in reversed(keep)}
        if len(self._slots) > self._stale:  # those of entries that are gone do no harm
            self._slots = {i: made for i, made in self._slots.items() if made() is not None}
            self._stale = max(STALE, 2 * len(self._slots))
        self._outside.clear()
        if self.brought:
            self.brought.clear()
            self.cut = []
        if self.numbers:
            self.numbers = []
        self.overflowed = False
        if self.dropped is not None and not self.dropped.goes_on():
            self.dropped = None

    def clear(self) -> None:
        """Forget everything."""
        self.entries.clear()
        self._slots.clear()
        self._outside.clear()
        self.memory.clear()
        self.inside.clear()
        self.brought.clear()
        self.cut = []
        self.numbers = []
        self.dropped = None
        self.overflowed = False

    def needed_for(self, numbers: set[int]) -> list[Entry]:
        """Return the entries these entries depend on, and themselves, in order."""
        return needed_for(self.entries, numbers, self.rolled)

    def _make_room(self) -> None:
        stale = [n for n, e in self.entries.items() if not e.needs_grad]
        for number in stale or list(self.entries):
            del self.entries[number]
        self._slots = {i: made for i, made in self._slots.items() if made.slot.entry in self.entries}
        self.overflowed = self.overflowed or not stale


def _alive(refs: Sequence[Made]) -> bool:
    for ref in refs:
        tensor = ref()
        try:
            if tensor is not None and not tensor.is_leaf:
                return True
        except RuntimeError:  # see `node_of`
            pass
    return False


def _unused(entry: Entry, read_later: set[int]) -> bool:
    """Whether a call made without gradients left nothing that anybody could still use."""
    if entry.needs_grad or entry.grad_enabled or entry.kind not in ("call", "module", "write"):
        return False
    target = target_of(entry) if entry.kind == "write" else None
    if isinstance(target, Outside):
        return id(target.tensor) not in read_later  # who meets the tensor from now on takes it as it is
    return all(ref() is None for ref in entry.refs)


def _is_large(entry: Entry) -> bool:
    return any(isinstance(read, Outside) and bytes_of(read.tensor) > WRITE_LIMIT for read in entry.reads)


def _is_state(tensor: torch.Tensor) -> bool:
    """Whether what is carried from step to step may be something that the next step builds on, not a loss that is summed up."""
    return _is_grad_enabled() and tensor.is_floating_point() and tensor.numel() > 1
