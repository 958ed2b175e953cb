"""The tape: one step written down as the calls that make it up.

An entry is one call made outside every module (loss code, clipping, `backward`) or one outermost module call. Arguments
are kept by reference; a tensor that an earlier entry made is kept as a *slot* and made again on replay, so large
intermediates are not held. Nothing inside a module is written down: the replay finds it again.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch.nn.parameter import UninitializedTensorMixin as _Lazy  # type: ignore[attr-defined]

from whynan.capsule.generators import States
from whynan.capsule.sites import Site

CONTAINERS = (tuple, list, dict)
READ_LIMIT = 64 << 20  # bytes of an outside tensor copied because the tape has read it and it is about to change
WRITE_LIMIT = 1 << 20  # the same for one that was not read before: a moving average, a counter
IDLE = 64  # calls without gradients after which the tape looks which of them can be forgotten
STALE = 256  # slots, above which they are looked through for those that are gone
HELD_LIMIT = 64 << 20  # or bytes of tensors they read
LEAVES = (int, float, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device, slice, range)


@dataclass(slots=True, unsafe_hash=True)  # never changed; a frozen one takes twice as long to make
class Slot:
    """The n-th tensor in the result of an entry."""

    entry: int
    index: int


class Carried(Protocol):
    """What a dropped step began with, see `recovery/carried.py`."""

    def goes_on(self) -> bool: ...
    def puts_back(self, site: Site | None, number: int, reads: Sequence[Slot | Inner | Outside], grad: bool, args: Any) -> bool: ...
    def leaves_out(self, target: torch.Tensor, sources: Any) -> bool: ...


class Made(weakref.ref[torch.Tensor]):
    """A tensor that an entry made, while the program holds it."""

    __slots__ = ("slot",)
    slot: Slot


@dataclass(frozen=True, slots=True)
class Inner:
    """A tensor born inside an entry and picked up elsewhere (a stashed auxiliary loss, a captured feature map).

    It is found again by the distance of its autograd node from the entry's first node.
    """

    entry: int
    offset: int
    output_nr: int


@dataclass(slots=True)
class Outside:
    """A tensor that no entry made: batch, parameter, constant. Its version tells whether it was changed since."""

    tensor: torch.Tensor
    version: int
    saved: torch.Tensor | None = None  # its value before the first change, where one was seen coming
    written: bool = False  # the step itself writes to it, perhaps through a view: a replay works on a copy
    writer: int = 0  # the entry that was the first to
    carried: bool = False  # made by the program in an earlier step
    handed: bool = False  # an input though it has a gradient, as a capsule says

    @property
    def changed(self) -> bool:
        return self.saved is None and version_of(self.tensor) != self.version

    def value(self) -> torch.Tensor:
        return self.tensor if self.saved is None else self.saved


class Entry:
    """One recorded call. What is seldom known of one is what the class says until it is set: several are made in every step."""

    rng: Any = None
    generators: States | tuple[()] = ()  # of the program's own
    last_node: int = 0
    outputs: int = 0
    needs_grad: bool = False
    reaches_back: bool = False  # its history begins in an earlier step
    refs: Sequence[Made] = ()
    wanted: set[tuple[int, int]] | frozenset[tuple[int, int]] = frozenset()  # of the tensors born inside, those that are picked up elsewhere
    caught: dict[tuple[int, str, int], tuple[int, int]] | None = None  # which call of the first replay, by number and name, and which of its results they were
    left: dict[Inner, tuple[torch.nn.Module, str]] | None = None  # of those, the ones that stand in an attribute of a module
    error: str = ""
    apart: bool | None = False  # computes with results of the step that were not handed to it; None where that is to be asked
    given: tuple[tuple[dict[str, Any], str, Any], ...] = ()  # attributes and parameters of the called module that the loop has set
    within: Within | None = None  # made by a hook of a module, inside another call
    caller: Site | None = None  # the line of the program that called the library which made this call

    def __init__(
        self,
        number: int,
        kind: str,  # module | call | write | grad | backward | derivative | clip | zero | optimizer | function
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        site: Site | None,
        grad_enabled: bool,
        autocast: tuple[tuple[str, bool, torch.dtype], ...],
        reads: Sequence[Slot | Inner | Outside] = (),  # every tensor among the arguments; these themselves where they are nothing else
        first_node: int = 0,
    ) -> None:
        self.number, self.kind, self.fn, self.args, self.kwargs = number, kind, fn, args, kwargs
        self.site, self.grad_enabled, self.autocast, self.reads, self.first_node = site, grad_enabled, autocast, reads, first_node


@dataclass(frozen=True, slots=True)
class Within:
    """The call that was in progress when a hook made calls of its own, and the module whose hook it was."""

    entry: Entry
    module: torch.nn.Module
    made: dict[Slot, torch.Tensor]  # of its arguments, those that the step itself made: they may be gone when somebody asks

    @property
    def name(self) -> str:
        """The path of that module in the model that was called."""
        root = self.entry.fn
        names = root.named_modules() if isinstance(root, torch.nn.Module) else ()
        return next((name for name, module in names if module is self.module), "") or type(self.module).__name__


class Rebuild:
    """An argument object with tensors inside, rebuilt on replay as a shallow copy with those tensors replaced."""

    def __init__(self, value: Any, attributes: dict[str, Any], items: Any) -> None:
        self.value, self.attributes, self.items = value, attributes, items

    def build(self, get: Callable[[Any], Any]) -> Any:
        """Make the copy, looking up every kept tensor with `get`."""
        if isinstance(self.value, tuple) and hasattr(self.value, "_fields"):
            return type(self.value)(*[get(v) for v in self.items])
        made = copy.copy(self.value)
        for name, kept in self.attributes.items():
            made.__dict__[name] = get(kept)
        if isinstance(self.items, dict):
            for key, kept in self.items.items():
                try:
                    made[key] = get(kept)
                except TypeError:
                    break  # an immutable container: its tensors are kept as they were
        return made


class Surrounded(Rebuild):
    """A function that takes results of the step from around it, by its closure or as globals: made anew with those of a replay."""

    def __init__(self, function: FunctionType, kept: dict[str, Any]) -> None:
        super().__init__(function, {}, kept)

    def build(self, get: Callable[[Any], Any]) -> Any:
        """Make the function."""
        function, held = self.value, {name: get(kept) for name, kept in self.items.items()}
        cells = tuple(CellType(held[n]) if n in held else c for n, c in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        made = FunctionType(function.__code__, {**function.__globals__, **held}, function.__name__, function.__defaults__, cells)
        made.__kwdefaults__ = function.__kwdefaults__
        return made


class Bound(Rebuild):
    """A method of an object that holds results of the step, or a function that was given some already (`partial`): made anew with those of a replay."""

    def build(self, get: Callable[[Any], Any]) -> Any:
        """Make the method, or the partial function."""
        made = get(self.items)
        if isinstance(self.value, MethodType):
            return MethodType(self.value.__func__, made["self"])
        return functools.partial(made["function"], *made["args"], **made["kwargs"])


def around(function: FunctionType) -> dict[str, Any]:
    """Return what a function takes from around it, by name: tensors, and lists of them."""
    code = function.__code__
    cells = {n: c.cell_contents for n, c in zip(code.co_freevars, function.__closure__ or (), strict=True) if is_filled(c)}
    named = {n: function.__globals__[n] for n in code.co_names if n in function.__globals__}
    return {n: v for n, v in (named | cells).items() if isinstance(v, torch.Tensor | list | tuple)}


def is_filled(cell: CellType) -> bool:
    """Whether a variable of a closure has a value already."""
    try:
        cell.cell_contents  # noqa: B018 (an empty cell raises)
    except ValueError:
        return False
    return True


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version counter; inference tensors have none."""
    try:
        return tensor._version
    except RuntimeError:
        return -1


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
        self._memory: dict[int, list[Outside]] = {}  # storage: the outside tensors that live in it
        self._patience = IDLE  # how many of these until the next look: as many as were kept at the last one, so that looking stays cheap
        self._idle = 0  # entries made without gradients since the last look whether anybody can still use them
        self._held = 0  # bytes of outside tensors met since then
        self._homes: list[tuple[torch.nn.Module, str]] = []  # attributes that tensors were picked up from
        self.forgets = False  # it is known where a step begins: an optimizer ends it
        self.cut: list[Entry] = []  # calls of this step that are not kept
        self.brought: dict[Slot | Inner, torch.Tensor] = {}  # the values of those results of earlier steps that this one reads with their history
        self.carries = False  # the program has computed with something that the step before had made
        self.dropped: Carried | None = None  # the step before this one, where it was dropped
        self.numbers: list[Slot] = []  # the calls of this step that read a bad number out of a tensor
        self.seen_apart: Callable[[torch.nn.Module], None] = lambda module: None
        self._unfiled: list[Outside] = []  # not in `_memory` yet: it is asked for only when something is written

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
        if computed and (inner := self._inner(tensor)) is not None:
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

    def _living_in(self, memory: int) -> list[Outside]:
        for outside in self._unfiled:
            self._memory.setdefault(memory_of(outside.tensor), []).append(outside)
        self._unfiled.clear()
        return self._memory.get(memory, [])

    def _inner(self, tensor: torch.Tensor) -> Inner | None:
        number = tensor.grad_fn._sequence_nr()  # type: ignore[union-attr]
        for entry in self.entries.values():
            if entry.first_node <= number < entry.last_node:
                home = self._home_of(tensor, entry.fn) if isinstance(entry.fn, torch.nn.Module) else None
                if home is None and self.stands_apart(entry, [tensor]):
                    return None
                inner = Inner(entry.number, number - entry.first_node, tensor.output_nr)
                entry.wanted = entry.wanted | {(inner.offset, inner.output_nr)}
                if home is not None:
                    entry.left = {**(entry.left or {}), inner: home}
                return inner
        return None

    def stands_apart(self, entry: Entry, made: Iterable[torch.Tensor]) -> bool:
        """Whether what a module call made goes back to calls of this step whose results it got by no argument: by a global, or a handler around it.

        A replay may not find them there any more. What others pick up from inside such a call is taken as it is.
        """
        if entry.apart is None:
            known = {entry.number, *dependencies(entry)}
            others = [e for e in self.entries.values() if e.number > self.rolled and e.number not in known]
            handed = {node_of(t) for read in entry.reads if isinstance(read, Slot) and (t := self.alive(read)) is not None}
            if any(e.first_node <= n < e.last_node and not _share(e.fn, entry.fn) for n in _behind(entry, made, handed) for e in others):
                entry.apart = True
                self.seen_apart(entry.fn)  # type: ignore[arg-type]
        return entry.apart is True

    def _home_of(self, tensor: torch.Tensor, root: torch.nn.Module) -> tuple[torch.nn.Module, str] | None:
        """Return the module and the attribute that a forward pass left a tensor in: where it was the last time, or anywhere below a root."""
        for home in self._homes:
            if home[0].__dict__.get(home[1]) is tensor:
                return home
        found = next(((m, name) for m in root.modules() for name, value in m.__dict__.items() if value is tensor), None)
        if found is not None:
            self._homes = [found, *self._homes[:7]]
        return found

    def about_to_change(self, tensor: torch.Tensor) -> None:
        """Keep the values of outside tensors whose memory is about to be written, if they were read or are small."""
        if isinstance(tensor, _Lazy) or tensor.is_inference():
            return
        known = self._living_in(memory_of(tensor))
        for outside in known:
            if not outside.written:
                outside.written, outside.writer = True, self.last
            if outside.saved is None and not outside.changed and _size(outside.tensor) <= READ_LIMIT:
                outside.saved = _copy(outside.tensor)
        if not known and self.slot_of(tensor) is None and _size(tensor) <= WRITE_LIMIT:
            outside = self.refer(tensor)  # type: ignore[assignment]
            if isinstance(outside, Outside):
                outside.saved, outside.written, outside.writer = _copy(tensor), True, self.last

    def living_in(self, tensor: torch.Tensor) -> list[Outside]:
        """Return the outside tensors of this step that share a tensor's memory."""
        return list(self._living_in(memory_of(tensor)))

    def written(self, since: int) -> list[Outside]:
        """Return the outside tensors that were written to since an entry, each as it was before that."""
        first: dict[int, Outside] = {}
        for outsides in self._memory.values():
            for outside in outsides:
                if outside.written and outside.writer > since:
                    first.setdefault(id(outside.tensor), outside)
        return list(first.values())

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
            self._memory.clear()
            self._unfiled = list(read.values())

    def roll(self) -> None:
        """Begin a new step: forget everything that nothing alive depends on."""
        needed: set[int] = set()
        keep: list[Entry] = []
        self._before, self.rolled = self.rolled, self.last
        self._unfiled = unfiled = []
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
        self._memory.clear()
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
        self._memory.clear()
        self._unfiled.clear()
        self._homes.clear()
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


def needed_for(entries: dict[int, Entry], numbers: set[int], since: int = 0) -> list[Entry]:
    """Return the entries these entries depend on, and themselves, in order; `since` an entry is where the step began."""
    keep = set(numbers)
    backward = {n for n, e in entries.items() if e.kind in ("backward", "zero")}
    weights: set[int] = set()  # and buffers, of the modules that are called, and those that calls read
    turn = first_backward(entries.values())
    overwritten = any(overwrites(e, turn) for e in entries.values())
    for number in reversed(entries):
        entry = entries[number]
        if (target := overwrites(entry, turn)) is not None and id(target.tensor) in weights:
            keep.add(number)
        if overwritten and number in keep:
            weights.update(map(id, held_by(entry.fn)) if isinstance(entry.fn, torch.nn.Module) else read_weights(entry))
        made_here = entry.kind == "write" and isinstance(target_of(entry), Slot | Inner)
        if made_here and since < number < max(numbers, default=0):
            keep.add(number)  # a write to a tensor made on the tape may be seen through any of its views
        if number in keep:
            keep.update(dependencies(entry))
            if entry.kind == "grad":
                keep.update(n for n in backward if n < number)
    return [e for n, e in entries.items() if n in keep]


def target_of(entry: Entry) -> object:
    """Return what a call writes to: its first argument, by position or by name."""
    return entry.args[0] if entry.args else next(iter(entry.kwargs.values()), None)


def overwrites(entry: Entry, turn: int) -> Outside | None:
    """Return the tensor from outside that an entry writes to, if that is no update of what the step trains.

    A teacher's weight, read by its module, or one that is initialised from what the step computes, before the way back begins at `turn`.
    """
    target = target_of(entry) if entry.kind == "write" else None
    if not isinstance(target, Outside):
        return None
    with torch._C.DisableTorchFunction():  # to ask for a gradient is a call that would be recorded
        replaced = entry.number < turn and getattr(entry.fn, "__name__", "") == "__set__"  # `weight.data = …`: nothing of what it was is left
        return target if is_leaf(target.tensor) and (target.tensor.grad is None or replaced) else None


def first_backward(entries: Iterable[Entry]) -> int:
    """Return the number of the first backward pass; 0 where there is none."""
    return min((e.number for e in entries if e.kind == "backward"), default=0)


def held_by(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that a module reads wherever it is called: parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def read_weights(entry: Entry) -> list[int]:
    """Return the numbers of the leaves from outside that a call reads and that gradients end in."""
    return [id(leaf.tensor) for leaf in entry.reads if isinstance(leaf, Outside) and leaf.tensor.requires_grad]


def node_of(tensor: torch.Tensor) -> Any:
    """Return the autograd node of a tensor; None also for a view made under no_grad of a weight that was written to since, of which torch refuses to say."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether gradients end in a tensor; such a view is no leaf."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def _behind(entry: Entry, made: Iterable[torch.Tensor], handed: set[Any]) -> Iterator[int]:
    """Yield the numbers of the autograd nodes from before a call that its results go back to, but for those `handed` to it."""
    seen = {None, *handed}  # holds them: the same node would come back as another object
    todo = [node_of(tensor) for tensor in made]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node._sequence_nr() < entry.first_node:
            yield node._sequence_nr()
        else:
            todo += [before for before, _ in node.next_functions]


def _share(one: object, other: object) -> bool:
    """Whether two calls are of models with parts in common: what the one leaves in attributes the other finds, also in a replay."""
    return isinstance(one, torch.nn.Module) and isinstance(other, torch.nn.Module) and not set(one.modules()).isdisjoint(other.modules())


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


def memory_of(tensor: torch.Tensor) -> int:
    """Identify the memory a tensor lives in."""
    if isinstance(tensor, _Lazy):
        return id(tensor)
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def bytes_of(tensor: torch.Tensor) -> int:
    """Return how much memory a dense tensor takes; what a sparse one holds is small."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def _is_state(tensor: torch.Tensor) -> bool:
    """Whether what is carried from step to step may be something that the next step builds on, not a loss that is summed up."""
    return _is_grad_enabled() and tensor.is_floating_point() and tensor.numel() > 1


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad and is_leaf(tensor))


def dependencies(entry: Entry) -> Iterator[int]:
    """Yield the numbers of the entries whose results this one reads or writes."""
    for kept in entry.reads:
        if not isinstance(kept, Outside):
            yield kept.entry


def leaves(tree: object) -> Iterator[object]:
    """Yield the leaves of nested tuples, lists and dicts."""
    if isinstance(tree, Rebuild):
        yield from leaves(tree.attributes)
        yield from leaves(tree.items)
    elif type(tree) in CONTAINERS or isinstance(tree, CONTAINERS):
        for item in tree.values() if isinstance(tree, dict) else tree:  # type: ignore[attr-defined]
            yield from leaves(item)
    else:
        yield tree


def tensors_of(tree: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """Yield the tensors in a result: nested containers, mappings, dataclasses and plain objects, in a fixed order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (LEAVES, type, torch.nn.Module)):
        return
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tensors_of(item, depth)
    elif isinstance(tree, dict):
        for item in tree.values():
            yield from tensors_of(item, depth)
    elif depth > 0 and hasattr(tree, "__dict__"):
        for item in list(vars(tree).values()):
            yield from tensors_of(item, depth - 1)
