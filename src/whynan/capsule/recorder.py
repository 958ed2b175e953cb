"""Write the tape while the user's program runs: a function mode for loose torch calls, hooks for everything it cannot see.

The mode is taken off the stack while a module, an optimizer, a backward pass or a data loader runs, so the inside of a
model runs at full speed and compiled code never sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from whynan.capsule.blanks import Blanks
from whynan.capsule.doors.collectives import Received
from whynan.capsule.drawn import Draws
from whynan.capsule.infinities import Infinities
from whynan.capsule.loads import Loads
from whynan.capsule.reached import modules_of
from whynan.capsule.roots import Begun, Roots
from whynan.capsule.setup import Setup
from whynan.capsule.sites import passer_at, passers, take_site, take_sites
from whynan.capsule.sorts import Sort, sort_of
from whynan.capsule.stack import OnStack, pop, push
from whynan.capsule.state.generators import Generators
from whynan.capsule.state.randomness import take_rng
from whynan.capsule.tape.arguments import Arguments, Reads
from whynan.capsule.tape.entries import Entry, Inner, Outside, Slot, Within
from whynan.capsule.tape.facts import bytes_of, is_leaf
from whynan.capsule.tape.memory import READ_LIMIT
from whynan.capsule.tape.nested import LEAVES, tensors_of
from whynan.capsule.tape.tape import Tape
from whynan.capsule.unseen import leave_out, unseen

_node_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_is_grad_enabled, _item, _detach_ = torch.is_grad_enabled, torch.Tensor.item, torch.Tensor.detach_
_autocast_on = torch._C._is_any_autocast_enabled


IDS = 1 << 20  # whole numbers given to a model that are kept as long as its hooks' calls
NUMBERS = 64  # bad numbers read out of tensors that are kept: an evaluation reads them without end
_PLAIN = frozenset({int, float, bool, str, type(None)})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_JOINS = frozenset({torch.cat, torch.stack, torch.concat, torch.vstack, torch.hstack, torch.Tensor.clone, torch.Tensor.to})


_PASS, _CALL, _WRITE, _RANDOM, _PROBE, _GRAD, _BLANK, _HANG, _CUT = Sort  # looked up once: every call outside modules asks


class Hearing(Protocol):
    """Who listens to modules."""

    now: dict[int, Any]  # by the id of a module that is heard in the call that runs
    listens: bool  # in the present step

    def hear(self, module: torch.nn.Module, result: Any) -> None: ...
    def listening(self, roots: Iterable[torch.nn.Module]) -> AbstractContextManager[None]: ...
    def around(self, module: Any, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any: ...


class Beside:
    """What stands beside the steps: batches that were drawn, own generators, bad values of the setup, infinities that are meant, loads."""

    def __init__(self) -> None:
        self.draws, self.generators, self.setup, self.infinities, self.loads = Draws(), Generators(), Setup(), Infinities(), Loads()
        self.seen_gradient: Callable[[], None] = lambda: None  # the program reads the gradient of a weight
        self.is_trained: Callable[[torch.Tensor], bool] = lambda leaf: True  # of what gradients end in: a weight, or an input that has a gradient


@unseen
class Recorder(OnStack):
    """Writes the tape of one thread: the one it is started in, or moves to.

    Cost: 1 to 4 µs for each torch call made outside modules; nothing inside them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.replayed: Callable[[Any], None] | None = None  # told of the losses a replayed step function goes back from
        self.stepped: list[torch.optim.Optimizer] = []  # whose step a replayed step function has come to: their gradients are its result
        self.failed: Entry | None = None
        self.received = Received()
        self.beside = Beside()
        self.arguments = Arguments(self.tape, self.beside.generators)
        self.roots = Roots(self.tape, self.arguments)
        self.playing: Entry | None = None  # of a replay
        self.within: Within | None = None  # the hook that runs, and the module call it was made in
        self.seen_probe: Callable[[torch.Tensor, object], None] = lambda tensor, result: None
        self.seen_write: Callable[[torch.Tensor, Any], bool] = lambda tensor, sources: True
        self.seen_written: Callable[[torch.Tensor, Entry], None] | None = None  # where nobody else looks at weights after an update
        self.faulty: Callable[[BaseException], None] = lambda error: None
        self.before_call: Callable[[], None] | None = None  # wanted before the next outermost module call
        self.before_draw: list[Callable[[], None]] = []  # wanted before the next batch is drawn, or that; each takes itself off
        self.outputs: Hearing | None = None  # listens to what modules return, where that was asked for
        self._sorts: dict[Any, Sort] = {}
        self.blanks = Blanks()

    def __torch_function__(  # type: ignore[override]
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            if self.inside or not self.running or (self.moved and not self.mine):
                return func(*args, **(kwargs or {}))
            sort = self._sorts.get(func)
            if sort is None:
                try:
                    sort = self._sorts[func] = sort_of(func)
                except Exception as error:
                    self.faulty(error)
                    sort = _PASS
            if sort is _PASS or torch._C._functorch.peek_interpreter_stack() is not None:
                return func(*args, **(kwargs or {}))
            if sort is _PROBE:
                site = None if func is _item else take_site()  # torch warns of other ways to read a number that has a gradient
                result = func(*args, **(kwargs or {})) if site is None else (passers.get(id(site)) or passer_at(site))(func, args, kwargs or {})
                if type(result) is float and result - result != 0:  # not finite
                    self._read_out(func, args, kwargs)
                if args and isinstance(args[0], torch.Tensor):
                    try:
                        self.seen_probe(args[0], result)
                    except Exception as error:
                        self.faulty(error)
                return result
            return self._loose_call(func, sort, args, kwargs or {}) if sort is not _HANG else self._hang(func, args, kwargs or {})
        except BaseException:
            leave_out()
            raise

    def _loose_call(self, func: Callable[..., Any], sort: Sort, args: Any, kwargs: dict[str, Any]) -> Any:
        entry: Entry | None = None
        if kwargs and sort is _CALL and kwargs.get("out") is not None:
            sort = _WRITE
        try:
            target = _target(args, kwargs) if sort is _WRITE else None
            if target is not None and not self.seen_write(target, args):
                return target
            if sort is _WRITE and target is None and self.tape.dropped is not None:  # `torch._foreach_mul_(weights, …)`
                self.seen_write(next(tensors_of(args)), ())
            entry = self.note("call", func, args, kwargs)
            if target is not None:
                for written in tensors_of(kwargs.get("out", target)):
                    self.tape.memory.about_to_change(written)
            if sort is _RANDOM:
                entry.rng = take_rng()
        except Exception as error:
            self.faulty(error)
        self.failed = entry
        site = entry.site if entry is not None else None
        result = func(*args, **kwargs) if site is None else (passers.get(id(site)) or passer_at(site, 2))(func, args, kwargs)
        self.failed = None
        if self.moved and not self.mine:
            return result  # watching has left this thread during the call
        if entry is not None and (isinstance(result, torch.Tensor) or sort is _WRITE or sort is _GRAD or _holds_tensor(result)):
            try:
                self._close(entry, sort, args, kwargs, result)
                if sort is _WRITE and self.seen_written is not None and (target := _target(args, kwargs)) is not None:
                    self.suspended(self.seen_written, target, entry)
            except Exception as error:
                self.faulty(error)
        return result

    def _read_out(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any] | None) -> None:
        """A bad number is read out of a tensor: what is computed with it in Python comes back as a number, and a replay is to know from where."""
        try:
            entry = self.note("call", func, args, kwargs)
            self.tape.add(entry, None)
            self.tape.numbers.append(Slot(entry.number, 0))
            del self.tape.numbers[:-NUMBERS]
        except Exception as error:
            self.faulty(error)

    def _hang(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A hook is hung on a tensor: one that the step made is made anew by a replay, and gets it again."""
        result = func(*args, **kwargs)
        try:
            target = _target(args, kwargs)
            if target is not None and not is_leaf(target):
                self.tape.add(self.note("write", func, args, kwargs), None)
        except Exception as error:
            self.faulty(error)
        return result

    def _close(self, entry: Entry, sort: Sort, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        entry.last_node = _node_number()
        blanks = self.blanks
        if sort is _CALL and not blanks.held:
            self.tape.add(entry, result)
            return
        target = _target(args, kwargs) if sort is _WRITE or blanks.held else None
        if blanks.held and target is not None and (sort is _WRITE or result is target):
            blanks.written(entry.fn, target)
        if sort is _RANDOM and not any(t.requires_grad for t in tensors_of(result)):
            for tensor in tensors_of(result):
                self.tape.forget(tensor)  # whoever uses it keeps it as an outside tensor
            return
        if sort is _WRITE:
            entry.kind = "write"
            self.tape.add(entry, target if result is None else result, cuts=entry.fn is _detach_)
        elif sort is _GRAD:
            entry.kind = "grad"
            self.tape.add(entry, result)
            self.beside.seen_gradient()
        else:
            if isinstance(result, torch.Tensor) and (sort is _BLANK or (entry.fn in _JOINS and blanks.among(args))):
                blanks.add(result.untyped_storage(), entry.site)
            self.tape.add(entry, result, cuts=sort is _CUT)

    def note(self, kind: str, fn: Callable[..., Any], args: Any = (), kwargs: dict[str, Any] | None = None, ours: int = 3) -> Entry:
        """Make an entry for a call that is about to be made; it is not on the tape yet. At least so many frames above are ours."""
        named = kwargs or {}
        plainly = not named or _PLAIN.issuperset(map(type, named.values()))
        reads: Reads | tuple[Slot | Inner | Outside, ...]
        if plainly and _TENSORS.issuperset(map(type, args)):
            arguments = reads = tuple(map(self.tape.refer, args))  # one object less for the garbage collector to go through
        else:
            reads, keep = [], self.arguments.keep
            arguments = tuple([v if type(v) in _PLAIN else keep(v, reads) for v in args])
            if not plainly:
                named = {k: v if type(v) in _PLAIN else keep(v, reads) for k, v in named.items()}
        site, caller = take_sites(ours + 1)
        if self.tape.numbers and any(type(v) is float and v - v != 0 for v in (*args, *named.values())):
            reads = (*reads, *self.tape.numbers)
        dropped = self.tape.dropped
        if dropped is not None and dropped.puts_back(site, self.tape.last + 1, reads, _is_grad_enabled(), args):
            return self.note(kind, fn, args, kwargs, ours + 1)
        self.tape.last = number = self.tape.last + 1
        autocast = autocast_state() if _autocast_on() else ()
        entry = Entry(number, kind, fn, arguments, named, site, _is_grad_enabled(), autocast, reads, _node_number())
        if caller is not None:
            entry.caller = caller
        if self.within is not None:
            entry.within = self.within
        return entry

    def opaque(self, kind: str, fn: Callable[..., Any], call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record `fn(*args)` as one entry, running it as `call(*args)` with recording suspended."""
        return self.suspended(self.recorded, kind, fn, call, args, kwargs)

    def recorded(self, kind: str, fn: Callable[..., Any], call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record `fn(*args)`, run as `call(*args)`; called with the mode off the stack."""
        try:
            uses = modules_of(fn, args, kwargs)
            begun = self._begin(uses, args, kwargs) if uses and not _only_shapes(args, kwargs) else []
            entry = self.note(kind, fn, args, kwargs)
            if begun:
                entry.uses = tuple(uses)
            self._note_state(entry, begun)
        except Exception as error:
            self.faulty(error)
            return call(*args, **kwargs)
        self.failed = entry
        with nullcontext() if self.outputs is None or not (begun and self.outputs.listens) else self.outputs.listening(uses):
            result = call(*args, **kwargs)
        self.failed = None
        self._add(entry, result)
        self._ended(entry, begun)
        return result

    def _begin(self, modules: Sequence[torch.nn.Module], args: Any, kwargs: dict[str, Any]) -> list[Begun]:
        """A model is about to run outside every other one: a step may begin with it."""
        if self.before_call is not None:
            self.before_call()
        if self.before_draw and _is_grad_enabled():  # not for a validation between update and scheduler
            self.draw()
        return self.roots.begin(modules, args, kwargs)

    def _note_state(self, entry: Entry, begun: list[Begun]) -> None:
        looking = next((state for state, looks in begun if looks), None)
        entry.rng = looking.draws.take() if looking is not None else take_rng()
        for state, _ in begun:
            if state.tables:
                self.roots.give(entry, state)
        if begun and self.beside.generators.known:
            entry.generators = self.beside.generators.take()

    def _ended(self, entry: Entry, begun: list[Begun]) -> None:
        for state, looks in begun:
            if looks or state.tables:
                try:
                    self.roots.ended(entry, state, looks)
                except Exception as error:
                    self.faulty(error)

    def module_called(self, module: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record an outermost module call, run as `call(*args)`, with the module's state from before it; called with the mode off the stack."""
        first = args[0] if args else None
        if first.is_meta if type(first) is torch.Tensor else _only_shapes(args, kwargs):
            return call(*args, **kwargs)
        try:
            begun = self._begin((module,), args, kwargs)
            entry = None
            if not begun[0][0].open:
                entry = self.note("module", module, args, kwargs, ours=4)
                self._note_state(entry, begun)
        except Exception as error:
            self.faulty(error)
            return call(*args, **kwargs)
        if entry is None:
            return self.opened(call, args, kwargs)
        self.failed = entry
        result = call(*args, **kwargs) if self.outputs is None or not self.outputs.listens else self.outputs.around(module, call, args, kwargs)
        self.failed = None
        self._add(entry, result)
        self._ended(entry, begun)
        return result

    def _add(self, entry: Entry, result: Any) -> None:
        try:
            entry.last_node = _node_number()
            self.tape.add(entry, result)
        except Exception as error:
            self.faulty(error)

    def ask_before_draw(self, action: Callable[[], None]) -> None:
        """Have something done before the next batch is drawn."""
        if action not in self.before_draw:
            self.before_draw.append(action)

    def draw(self) -> None:
        """A batch is about to be drawn."""
        for action in list(self.before_draw):
            action()

    def resumed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a user's hook that is called from inside a module with recording on again."""
        if not self.inside or not self.running or self.replaying or not self.mine:
            return call(*args, **kwargs)
        outer, entry, around = self.inside, self.failed, self.within
        within = self._hooked(entry, args[0]) if entry is not None and args and isinstance(args[0], torch.nn.Module) else around
        first = self.tape.number()
        self.inside, self.within = 0, within
        try:
            push(self)
            return call(*args, **kwargs)
        finally:
            self.inside, self.within = outer, around
            if self.running and (top := pop()) is not self:  # else `stop` took it off
                push(top)
            self.failed = self.failed or entry  # what goes wrong after the hook is the call's own fault
            try:
                self.tape.drop_unless_trained(first)
            except Exception as error:
                self.faulty(error)

    def _hooked(self, entry: Entry, module: torch.nn.Module) -> Within:
        made = {leaf: self.tape.alive(leaf) for leaf in entry.reads if isinstance(leaf, Slot)}
        return Within(entry, module, {slot: t for slot, t in made.items() if t is not None and not t.is_floating_point() and t.numel() <= IDS})

    def left_out(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
        """Stand in for an optimizer's step during a replay: nothing is updated, a closure is evaluated once."""
        self.stepped.append(optimizer)
        closure = args[0] if args else kwargs.get("closure")
        with torch.enable_grad():
            return closure() if closure is not None else None

    def goes_back(self) -> None:
        """A backward pass begins inside a function that is recorded whole (a compiled one): that call is the step, as a step function's."""
        if self.failed is not None and self.failed.kind == "call" and not self.replaying and self.mine:
            self.failed.kind = "function"

    def about_to_load(self, module: torch.nn.Module) -> None:
        """State is about to be loaded into a module: what the program has read of it is kept, where that is little."""
        try:
            read = [tensor for tensor in (*module.parameters(), *module.buffers()) if self.tape.memory.living_in(tensor)]
            if sum(map(bytes_of, read)) <= READ_LIMIT:
                for tensor in read:
                    self.tape.memory.about_to_change(tensor)
        except Exception as error:
            self.faulty(error)

    def came_in(self, tensor: torch.Tensor) -> None:
        """A collective wrote to a tensor: what it and its views hold was made elsewhere."""
        self.tape.forget_memory(tensor)
        self.blanks.forget(tensor.untyped_storage())

    def entry_number(self) -> int | None:
        """Return the entry in progress, recorded or replayed: 0 between entries and in a backward pass, None in a step function."""
        if self.replaying and self.playing is not None and self.playing.kind == "function":
            return None
        entry = self.playing if self.replaying else self.failed
        return 0 if entry is None or entry.kind == "backward" else entry.number

    def roll(self, under_way: bool = False, left: int | None = None) -> None:
        """Begin a new step; one without optimizers may be under way already: its forward pass comes before anybody knows that the last one is over.

        So may one after a step that the program has `left` at an entry: what the models began with stays then.
        """
        self.beside.setup.step_over(self.tape)
        self.tape.roll()
        if left is None:
            self.roots.roll(under_way)
        if self.received.kept or self.received.refused:
            self.received.clear(left)
        self.failed = None


def _target(args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor a call writes to: `out`, or its first argument, by position or by name."""
    if "out" in kwargs:
        return next(tensors_of(kwargs["out"]), None)
    first = args[0] if args else next(iter(kwargs.values()), None)
    return first if isinstance(first, torch.Tensor) else None


def _only_shapes(args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call is made on the meta device, to learn shapes: no step begins with it."""
    first = args[0] if args and isinstance(args[0], torch.Tensor) else next(tensors_of((args, kwargs)), None)
    return first is not None and first.is_meta


def _holds_tensor(result: object) -> bool:
    return not isinstance(result, LEAVES) and next(tensors_of(result), None) is not None


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Return device type, switch and dtype of each autocast that is on."""
    found = []
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            found.append((device, True, torch.get_autocast_dtype(device)))
    return tuple(found)
