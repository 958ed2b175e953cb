"""Write the tape while the user's program runs: a function mode for loose torch calls, hooks for everything it cannot see.

The mode is taken off the stack while a module, an optimizer, a backward pass or a data loader runs, so the inside of a
model runs at full speed and compiled code never sees it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from threading import current_thread, local, main_thread
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from whynan.capsule.beginning import Beginning
from whynan.capsule.blanks import Blanks
from whynan.capsule.collectives import Received
from whynan.capsule.drawn import Draws
from whynan.capsule.infinities import Infinities
from whynan.capsule.loads import Loads
from whynan.capsule.setup import Setup
from whynan.capsule.sites import forget, passer_at, passers, take_site, take_sites
from whynan.capsule.sorts import Sort, sort_of
from whynan.capsule.state.generators import Generators
from whynan.capsule.state.modules import ModuleState
from whynan.capsule.state.randomness import take_rng
from whynan.capsule.state.surroundings import Spot
from whynan.capsule.tape.arguments import Bound, Rebuild, Surrounded, around
from whynan.capsule.tape.entries import Entry, Inner, Outside, Slot, Within
from whynan.capsule.tape.facts import bytes_of, is_leaf
from whynan.capsule.tape.memory import READ_LIMIT
from whynan.capsule.tape.nested import CONTAINERS, LEAVES, tensors_of
from whynan.capsule.tape.tape import Tape
from whynan.capsule.unseen import leave_out, unseen
from whynan.errors import TrainingStopped

_pop = torch._C._pop_torch_function_stack
_push = torch._C._push_on_torch_function_stack
modes = torch._C._len_torch_function_stack  # how many are on the stack of this thread
_at = torch._C._get_function_stack_at
_node_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_is_grad_enabled, _item, _detach_ = torch.is_grad_enabled, torch.Tensor.item, torch.Tensor.detach_
_autocast_on = torch._C._is_any_autocast_enabled


ELSEWHERE: Any = object()  # a call that is not to be recorded where it is made
IDS = 1 << 20  # whole numbers given to a model that are kept as long as its hooks' calls
NUMBERS = 64  # bad numbers read out of tensors that are kept: an evaluation reads them without end
FORGET = 64  # steps after which a module that is not called any more is let go
_SHORT = 256  # items of a container that is looked into at every call
_FUNCTIONS = frozenset({FunctionType, MethodType, functools.partial})
_PLAIN = frozenset({int, float, bool, str, type(None)})
_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_CLOSED = ("torch.nn.parallel", "torch.distributed", "torch._dynamo", "torch.jit")  # classes whose calls do more than compute
_JOINS = frozenset({torch.cat, torch.stack, torch.concat, torch.vstack, torch.hstack, torch.Tensor.clone, torch.Tensor.to})


_PASS, _CALL, _WRITE, _RANDOM, _PROBE, _GRAD, _BLANK, _HANG, _CUT = Sort  # looked up once: every call outside modules asks


class Hearing(Protocol):
    """Who listens to modules."""

    now: dict[int, Any]  # by the id of a module that is heard in the call that runs
    listens: bool  # in the present step

    def hear(self, module: torch.nn.Module, result: Any) -> None: ...
    def around(self, module: Any, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any: ...


class Beside:
    """What stands beside the steps: batches that were drawn, own generators, bad values of the setup, infinities that are meant, loads, a step's beginning."""

    def __init__(self, tape: Tape) -> None:
        self.draws, self.generators, self.setup, self.infinities, self.loads = Draws(), Generators(), Setup(), Infinities(), Loads()
        self.beginning = Beginning(tape)
        self.seen_gradient: Callable[[], None] = lambda: None  # the program reads the gradient of a weight
        self.is_trained: Callable[[torch.Tensor], bool] = lambda leaf: True  # of what gradients end in: a weight, or an input that has a gradient


_of_thread = local()


class _ThreadEnd:
    """Takes a mode off the stack of a thread that ends: torch would want the interpreter for that when there may be none any more."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __del__(self) -> None:
        self._recorder.take_off()


@unseen
class Recorder(TorchFunctionMode):
    """Writes the tape of one thread: the one it is started in, or moves to.

    Cost: 1 to 4 µs for each torch call made outside modules; nothing inside them.
    """

    moved = False  # to another thread than the one it was started in, on whose stack it still is

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape()
        self.tape.inside.seen_apart = self._open
        self.states: dict[int, tuple[torch.nn.Module, ModuleState]] = {}
        self.thread = current_thread()
        self.running = False
        self.inside = 0
        self.replaying = False
        self.replayed: Callable[[Any], None] | None = None  # told of the losses a replayed step function goes back from
        self.stepped: list[torch.optim.Optimizer] = []  # whose step a replayed step function has come to: their gradients are its result
        self.failed: Entry | None = None
        self.received = Received()
        self.beside = Beside(self.tape)
        self.playing: Entry | None = None  # of a replay
        self.within: Within | None = None  # the hook that runs, and the module call it was made in
        self.seen_probe: Callable[[torch.Tensor, object], None] = lambda tensor, result: None
        self.seen_write: Callable[[torch.Tensor, Any], bool] = lambda tensor, sources: True
        self.seen_written: Callable[[torch.Tensor, Entry], None] | None = None  # where nobody else looks at weights after an update
        self.seen_root: Callable[[torch.nn.Module], None] = lambda root: None
        self.faulty: Callable[[BaseException], None] = lambda error: None
        self.before_call: Callable[[], None] | None = None  # wanted before the next outermost module call
        self.before_draw: list[Callable[[], None]] = []  # wanted before the next batch is drawn, or that; each takes itself off
        self.outputs: Hearing | None = None  # listens to what modules return, where that was asked for
        self._sorts: dict[Any, Sort] = {}
        self._reads: list[Slot | Inner | Outside] = []
        self.blanks = Blanks()
        self._begun: dict[int, None] = {}  # roots whose state was taken, in this order
        self._again: dict[int, None] = {}  # and those that had an earlier micro-batch in this step
        self._called: dict[int, int] = {}  # by root: the step of its last call; in the order of the first calls in it
        self.has_buffers = False  # some root has had any
        self._rolls = 0
        self.between = False  # a program without optimizers has gone back: what it calls next begins a step

    def start(self) -> None:
        """Begin to record in this thread."""
        self.thread = current_thread()
        self.running = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def move(self) -> None:
        """Go on in this thread instead; the one before is let alone."""
        self.moved = True
        self.thread = current_thread()
        if all(_at(i) is not self for i in range(modes())):  # else it was here before
            self.__enter__()  # type: ignore[no-untyped-call]
            if self.thread is not main_thread():
                _of_thread.end = _ThreadEnd(self)

    def stop(self) -> None:
        """Stop recording and take the mode off the stack, wherever it is; called again it does no harm."""
        self.running = False
        forget()
        self.take_off()

    def take_off(self) -> None:
        """Take the mode off the stack of this thread."""
        above: list[Any] = []
        held = [_at(i) for i in range(modes())]
        if not any(mode is self for mode in held):
            return  # inside our own handler, or suspended: `suspended` and `resumed` do not put it back any more
        while (mode := _pop()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push(mode)

    @property
    def mine(self) -> bool:
        """Whether this is the thread it records in; not by its number, which a later thread may get."""
        return current_thread() is self.thread

    @property
    def replays_here(self) -> bool:
        """Whether a call made now is one of a replay; what other threads do meanwhile is none."""
        return self.replaying and self.mine

    @property
    def here(self) -> bool:
        """Whether a call made now would be recorded: right thread, not inside anything recorded already."""
        return self.running and not self.inside and self.mine

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
                if args and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
                    try:
                        self.seen_probe(args[0], result)
                    except Exception as error:
                        self.faulty(error)
                return result
            return self._loose_call(func, sort, args, kwargs or {}) if sort is not _HANG else self._hang(func, args, kwargs or {})
        except BaseException:
            leave_out()
            raise

    def short_way(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's `handle_torch_function`, shortened where this mode is on top: it stands before those of its functions that are written in Python."""

        def handled(public_api: Callable[..., Any], relevant_args: Any, /, *args: Any, **kwargs: Any) -> Any:
            top: Any = self
            try:
                try:
                    top = _pop()
                except RuntimeError:  # no mode at all: a tensor of another class
                    top = None
                if top is self:
                    return self.__torch_function__(public_api, (), args, kwargs)
            except BaseException:
                leave_out()
                raise
            finally:
                if top is not None:
                    _push(top)
            return handle(public_api, relevant_args, *args, **kwargs)

        return handled

    def _loose_call(self, func: Callable[..., Any], sort: Sort, args: Any, kwargs: dict[str, Any]) -> Any:
        entry: Entry | None = None
        try:
            target = _target(args, kwargs) if sort is _WRITE else None
            if target is not None and not self.seen_write(target, args):
                return target
            if sort is _WRITE and target is None and self.tape.dropped is not None:  # `torch._foreach_mul_(weights, …)`
                self.seen_write(next(tensors_of(args)), ())
            entry = self.note("call", func, args, kwargs)
            if target is not None:
                self.tape.memory.about_to_change(target)
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
        reads: Sequence[Slot | Inner | Outside]
        if plainly and _TENSORS.issuperset(map(type, args)):
            arguments = reads = tuple(map(self.tape.refer, args))  # one object less for the garbage collector to go through
        else:
            self._reads = reads = []
            arguments = tuple([v if type(v) in _PLAIN else self._keep(v) for v in args])
            if not plainly:
                named = {k: v if type(v) in _PLAIN else self._keep(v) for k, v in named.items()}
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

    def _keep(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            kept = self.tape.refer(value)
            self._reads.append(kept)
            return kept
        if type(value) in _FUNCTIONS and self.takes_results(value):
            return self._keep_function(value)
        if isinstance(value, (LEAVES, torch.nn.Module)) or callable(value):
            return value
        kind = type(value)
        if kind is list or kind is tuple:
            return kind([self._keep(v) for v in value])
        if kind is dict:
            return {k: self._keep(v) for k, v in value.items()}
        if kind is torch.Generator:
            self.beside.generators.find([value])
            return value
        return self._keep_object(value)

    def takes_results(self, function: Any) -> bool:
        """Whether a function computes with results of the step that it takes from around it (`vmap(lambda v: grad(loss, …, v))`)."""
        if type(function) is functools.partial:
            return self.takes_results(function.func) or self._hold_results([function.args, function.keywords])
        if type(function) is MethodType:
            owner = function.__self__
            return not isinstance(owner, torch.nn.Module | type) and self._hold_results(list(getattr(owner, "__dict__", {}).values()))
        return type(function) is FunctionType and bool(self._results_around(function))

    def _keep_function(self, function: Any) -> Any:
        """Keep a function that takes results of the step so that it is made anew with those of a replay."""
        if type(function) is FunctionType:
            return Surrounded(function, {name: self._keep(held) for name, held in self._results_around(function).items()})
        if type(function) is MethodType:
            return Bound(function, {}, {"self": self._keep_object(function.__self__)})
        return Bound(function, {}, {"function": self._keep(function.func), "args": self._keep(function.args), "kwargs": self._keep(function.keywords)})

    def _results_around(self, function: FunctionType) -> dict[str, Any]:
        return {name: value for name, value in around(function).items() if self._are_results(value)}

    def _are_results(self, values: Any) -> bool:
        return any(self.tape.slot_of(tensor) is not None for tensor in tensors_of(values))

    def _hold_results(self, values: list[Any]) -> bool:
        """Whether results of the step are among some values, or in short containers among them: an object may hold a whole data set."""
        short = [v.values() if isinstance(v, dict) else v for v in values if isinstance(v, CONTAINERS) and len(v) <= _SHORT]
        tensors = (t for held in (values, *short) for t in held if isinstance(t, torch.Tensor))
        return any(self.tape.slot_of(tensor) is not None for tensor in tensors)

    def _keep_object(self, value: Any) -> Any:
        """Keep an object that carries tensors (a batch class, a ModelOutput) so that the made ones are made again."""
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return Rebuild(value, {}, [self._keep(v) for v in value])
        if isinstance(value, CONTAINERS):
            items = dict(value.items()) if isinstance(value, dict) else dict(enumerate(value))
            kept = {k: self._keep(v) for k, v in items.items()}
            attributes = {k: self._keep(v) for k, v in vars(value).items() if isinstance(v, torch.Tensor)} if hasattr(value, "__dict__") else {}
            return Rebuild(value, attributes, kept)
        attributes = {k: self._keep(v) for k, v in vars(value).items() if isinstance(v, torch.Tensor | dict | list)} if hasattr(value, "__dict__") else {}
        made = any(not isinstance(leaf, Outside) for leaf in attributes.values())
        return Rebuild(value, attributes, None) if made else value

    def opaque(self, kind: str, fn: Callable[..., Any], call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record `fn(*args)` as one entry, running it as `call(*args)` with recording suspended."""
        return self.suspended(self.recorded, kind, fn, call, args, kwargs)

    def recorded(self, kind: str, fn: Callable[..., Any], call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record `fn(*args)`, run as `call(*args)`; called with the mode off the stack."""
        try:
            entry = self.note(kind, fn, args, kwargs)
            entry.rng = take_rng()
        except Exception as error:
            self.faulty(error)
            return call(*args, **kwargs)
        self.failed = entry
        result = call(*args, **kwargs)
        self.failed = None
        self._add(entry, result)
        return result

    def module_called(self, module: torch.nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Record an outermost module call, run as `call(*args)`, with the module's state from before it; called with the mode off the stack."""
        first = args[0] if args else None
        if first.is_meta if type(first) is torch.Tensor else _only_shapes(args, kwargs):
            return call(*args, **kwargs)
        try:
            if self.before_call is not None:
                self.before_call()
            if self.before_draw and _is_grad_enabled():  # not for a validation between update and scheduler
                self.draw()
            if self._begun and self._begins_anew(module, args, kwargs):
                self.set_aside()
            state, looks = self._begin_state(module)
            entry = None
            if not state.open:
                entry = self.note("module", module, args, kwargs, ours=4)
                entry.rng = state.draws.take() if looks else take_rng()
                if state.tables:
                    self._give(entry, state)
                if self.beside.generators.known:
                    entry.generators = self.beside.generators.take()
        except Exception as error:
            self.faulty(error)
            return call(*args, **kwargs)
        if entry is None:
            return self._opened(call, args, kwargs)
        self.failed = entry
        result = call(*args, **kwargs) if self.outputs is None or not self.outputs.listens else self.outputs.around(module, call, args, kwargs)
        self.failed = None
        self._add(entry, result)
        if looks or state.tables:
            self._ended(entry, state, looks)
        return result

    def _opened(self, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a module with recording on: its call alone, without what stands around it, cannot be made again."""
        outer, self.inside = self.inside, 0
        below = any(_at(i) is self for i in range(modes()))  # a mode of the user's stands above
        try:
            if not below:
                _push(self)
            return call(*args, **kwargs)
        finally:
            self.inside = outer
            if not below and self.running and (top := _pop()) is not self:  # else `stop` took it off
                _push(top)

    def _open(self, module: torch.nn.Module) -> None:
        """Have a module run with recording on from its next call on, where that can be."""
        known = self.states.get(id(module))
        if known is not None and not any(cls.__module__.startswith(_CLOSED) for cls in type(module).__mro__):
            known[1].open = module._compiled_call_impl is None

    def _give(self, entry: Entry, state: ModuleState) -> None:
        """Note what the loop has put into a module (the weights of a hypernetwork, fast weights): a replay puts it there before the call."""
        reads: list[Slot | Inner | Outside]
        for table, name, value, since in state.given():
            self._reads = reads = []
            kept = self._keep(value)
            if isinstance(kept, Slot) and state.is_of_buffers(table) and self.tape.is_write_from_outside(kept):
                continue
            if since or any(not isinstance(read, Outside) and read.entry > self.tape.rolled for read in reads):
                entry.given = (*entry.given, (table, name, kept))
                entry.reads = (*entry.reads, *reads)

    def _ended(self, entry: Entry, state: ModuleState, looks: bool) -> None:
        try:
            if looks:
                state.ended(entry.rng)
            if state.draws.calls < 4:
                entry.apart = None
                self.tape.inside.stands_apart(entry, [made for ref in entry.refs if (made := ref()) is not None])
            if state.tables:
                state.called()
        except Exception as error:
            self.faulty(error)

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

    def _begins_anew(self, root: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the calls of this step so far came to nothing, and a call that is about to be made is its first."""
        if self._again or not self.tape.forgets or not (root.training or _is_grad_enabled()):
            return False
        return self.beside.beginning.came_to_nothing((args, kwargs))

    def set_aside(self) -> None:
        """What the models have done since the last step stays: a dropped step is put back to where it is now."""
        self.beside.beginning.aside |= self._begun
        self._begun.clear()
        self.beside.beginning.anew()
        for key in self.beside.beginning.aside:
            if known := self.states.get(key):
                known[1].aside = True

    def _begin_state(self, root: torch.nn.Module) -> tuple[ModuleState, bool]:
        """Take a module's state before its first call in a step; return it, and whether this call is to be watched for what it does outside torch."""
        key = id(root)
        if self.between:
            self.between = False
            self._end_states()
        known = self.states.get(key)
        if known is None or known[0] is not root:
            self.seen_root(root)
            self.states[key] = known = (root, ModuleState(root))
            self.beside.generators.find_around(root)
            self._begun.pop(key, None)
            self.has_buffers = self.has_buffers or any(m._buffers for m in root.modules())
        elif known[1].is_old and key not in self._begun and key not in self._again and key not in self.beside.beginning.aside:
            self.states[key] = known = (root, known[1].renewed())
            self.has_buffers = self.has_buffers or any(m._buffers for m in root.modules())
        state = known[1]
        if key not in self._begun and (root.training or _is_grad_enabled() or not state.calls):  # a validation between two steps belongs to neither
            self._begun[key] = None
            again = key in self._again
            self.beside.beginning.aside.pop(key, None)
            state.begin(again)
            if not again:
                self._called.pop(key, None)
                self._called[key] = self._rolls
        elif state.tables:
            state.further()
        draws = state.draws
        draws.calls += 1
        return state, draws.drew or draws.calls % 64 < 4

    def altered(self, module: torch.nn.Module) -> None:
        """A module gets another one in it, or a new buffer."""
        for _, state in self.states.values():
            state.alter(module)

    def suspended(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run something with the mode off the stack."""
        result = self.outermost(functools.partial(call, **kwargs) if kwargs else call, *args)
        return call(*args, **kwargs) if result is ELSEWHERE else result

    def outermost(self, call: Callable[..., Any], *args: Any) -> Any:
        """Do the same where a call made now would be recorded; else nothing is run, and the answer is `ELSEWHERE`.

        Every door asks this. That the mode is on top of this thread's stack says all of `here`, with one call instead of five.
        """
        if self.inside:
            return ELSEWHERE
        top: Any = self
        try:  # a signal handler may raise after any call, also after the next
            try:
                top = _pop()
            except RuntimeError:  # nothing on the stack of this thread
                top = None
            if top is self:
                if self.moved and not self.mine:
                    return ELSEWHERE
                self.inside += 1
                try:
                    return call(*args)
                except TrainingStopped as stop:
                    raise stop.with_traceback(None) from None  # the user's traceback is about the user's lines
                finally:
                    self.inside -= 1
        finally:
            if top is not None and (top is not self or self.running):
                _push(top)
        return self._below(call, args)

    def _below(self, call: Callable[..., Any], args: Any) -> Any:
        """Inside our own handler, or under a mode of the user's, the mode is not on top."""
        if not self.here:
            return ELSEWHERE
        self.inside += 1
        try:
            return call(*args)
        finally:
            self.inside -= 1

    def resumed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a user's hook that is called from inside a module with recording on again."""
        if not self.inside or not self.running or self.replaying or not self.mine:
            return call(*args, **kwargs)
        outer, entry, around = self.inside, self.failed, self.within
        within = self._hooked(entry, args[0]) if entry is not None and args and isinstance(args[0], torch.nn.Module) else around
        first = self.tape.number()
        self.inside, self.within = 0, within
        try:
            _push(self)
            return call(*args, **kwargs)
        finally:
            self.inside, self.within = outer, around
            if self.running and (top := _pop()) is not self:  # else `stop` took it off
                _push(top)
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

    def roll(self, under_way: bool = False) -> None:
        """Begin a new step; one without optimizers may be under way already: its forward pass comes before anybody knows that the last one is over."""
        self.beside.setup.step_over(self.tape)
        self.tape.roll()
        self.beside.beginning.roll()
        self._end_states(rests=True, ends=not under_way)
        self._rolls += 1
        if self._rolls % FORGET == 0:
            self._forget_unused()
        if self.received.kept:
            self.received.clear()
        self.failed = None

    def _end_states(self, rests: bool = False, ends: bool = True) -> None:
        """What the models of a step began with is not needed any more; it `rests` at the end of a step, not when the next one calls."""
        for key in self._keys():
            if known := self.states.get(key):
                state = known[1]
                if rests and state.begun and not state.still:
                    state.rest()
                if ends:
                    state.begun = state.aside = False
        if ends:
            self._begun.clear()
            self._again.clear()
            self.beside.beginning.aside.clear()

    def _keys(self) -> dict[int, None]:
        """Return the roots called in this step, those set aside first."""
        return self.beside.beginning.aside | self._again | self._begun if self._again or self.beside.beginning.aside else self._begun

    def _forget_unused(self) -> None:
        """Let go of modules that were not called for long: a criterion made anew in every step, the model of an earlier trial."""
        for key in [k for k, last in self._called.items() if last < self._rolls - FORGET]:
            del self._called[key]
            self.states.pop(key, None)

    def latest_first(self, micro_batch: bool = False) -> list[ModuleState]:
        """Return the state of the roots called in this step, or only in its last micro-batch, in the order to put it back in.

        A model and a part of it may both be called: the part's state is then from after the model's call, or the other way round.
        """
        keys = self._begun if micro_batch else self._keys()
        return [self.states[key][1] for key in reversed(keys) if key in self.states]

    def to_replay(self) -> list[tuple[torch.nn.Module, ModuleState]]:
        """Return all roots with their states in the order to load them in: those of earlier steps before those of the last one."""
        keys = [*reversed(self._called)]  # of one step the latest first
        return [self.states[key] for key in sorted(keys, key=self._called.__getitem__) if key in self.states]

    def current(self) -> list[ModuleState]:
        """Return the state of the roots that were called in this step."""
        return [self.states[key][1] for key in self._keys() if key in self.states]

    def current_roots(self) -> list[torch.nn.Module]:
        """Return the roots that were called in this step."""
        return [self.states[key][0] for key in self._keys() if key in self.states]

    def next_micro_batch(self) -> None:
        """Take module state anew within the same step, so that a micro-batch can be dropped alone."""
        self._again |= self._begun
        self._begun.clear()

    def around(self) -> list[Spot]:
        """Return what the code of these modules was seen to change outside them. Nothing else is touched: other threads change things, too."""
        return [spot for _, state in self.states.values() for spot in state.around.busy]

    def roots(self) -> list[torch.nn.Module]:
        """Return the outermost modules seen so far."""
        return [root for root, _ in self.states.values()]


def _target(args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tensor an in-place call writes to: its first argument, by position or by name."""
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
