"""Play a tape again: the same calls with the same values, random state and switches, leaving no trace.

The player runs in the thread that asks, with the backward pass on the same thread, so that what happens has one order.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from whynan.capsule.alone import in_flat_shards, unmanaged, unreplicated
from whynan.capsule.doors.collectives import Refused, several
from whynan.capsule.doors.compiled import eagerly
from whynan.capsule.doubles import doubled
from whynan.capsule.recorder import Recorder
from whynan.capsule.refusing import refused_collectives
from whynan.capsule.state.generators import put
from whynan.capsule.state.holdings import write_back
from whynan.capsule.state.randomness import moved, put_rng, take_rng
from whynan.capsule.state.stasis import Stasis, in_own_memory
from whynan.capsule.tape.arguments import Rebuild
from whynan.capsule.tape.entries import Entry, Inner, Outside, Slot, target_of
from whynan.capsule.tape.facts import is_leaf, is_released, node_of
from whynan.capsule.tape.needs import first_backward, held_by, overwrites, read_weights
from whynan.capsule.tape.nested import tensors_of
from whynan.errors import let_through
from whynan.resting import no_output, no_warnings

_node_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
_SAME = frozenset({"__get__", "detach", "detach_"})  # of a gradient: the gradient itself
_ZEROING = frozenset({"zero_", "zeros_like", "_foreach_zero_", "__set__"})


class Listener(Protocol):
    """What wants to know which entry is being played (the tracer)."""

    def entering(self, entry: Entry) -> None: ...
    def leaving(self, entry: Entry) -> None: ...


@dataclass(slots=True)
class Run:
    """The outcome of one replay."""

    made: dict[Slot | Inner, torch.Tensor] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    error: BaseException | None = None
    failed_at: Entry | None = None

    copies: dict[int, torch.Tensor] = field(default_factory=dict)

    def outside(self, kept: Outside) -> torch.Tensor:
        """Return an outside tensor's value from when the step read it; one that the step writes to as a copy."""
        value = kept.value()
        if is_released(value):
            raise RuntimeError(f"a tensor of shape {list(value.shape)} that the step read has no memory any more")
        if not kept.written or (value.requires_grad and kept.saved is None):
            return value
        if id(kept) not in self.copies:
            self.copies[id(kept)] = value.detach().clone().requires_grad_(value.requires_grad)
        return self.copies[id(kept)]


class Enough(BaseException):
    """Raised by who watches a replay and has seen all that it is to see. No `Exception`: a program's own handler must not swallow it."""


class Program:
    """Something that can be run again: a piece of tape with the state it started from.

    `targets` are the loss tensors and `leaves` the tensors that gradients end in. `on_weights`: it is what the program does to its weights itself.
    """

    def __init__(
        self,
        recorder: Recorder,
        entries: list[Entry],
        leaves_: list[torch.Tensor],
        undo: Callable[[], AbstractContextManager[object]] | None = None,
        on_weights: bool = False,
    ) -> None:
        self.recorder = recorder
        self.entries = entries
        self.leaves = leaves_
        self.skip_backward = False
        self.without_graph = False
        self.guessed = ""  # why the last replay was not the step as it was
        self.given: dict[Slot | Inner, torch.Tensor] = {}  # results of other calls, from before what is played
        self.undo = undo  # for an optimizer's step: keeps gradients in place and takes the update back
        self.change: Callable[[], AbstractContextManager[object]] = nullcontext  # of the program's source, in force while it plays
        self.roots = list({id(e.fn): e.fn for e in entries if isinstance(e.fn, torch.nn.Module)}.values())
        self.roots += [r for r in recorder.roots.modules() if all(r is not x for x in self.roots)]
        self.weights = {id(t) for root in self.roots for t in held_by(root)}  # and buffers
        turn, read = first_backward(entries), self.weights.union(*map(read_weights, entries))
        self._written = {id(t): t for e in entries if (t := overwrites(e, turn)) is not None and t.saved is not None and id(t.tensor) in read}
        if self.ends_with_update or on_weights:
            self._written |= {id(t): t for e in entries for t in e.reads if isinstance(t, Outside) and t.tensor.requires_grad and is_leaf(t.tensor)}
        self._written_late = _called_before_written(entries, self._written) if self._written else set()
        rewound = [(root, s) for root, s in recorder.roots.to_replay() if any(root is r for r in self.roots)]
        self._rewound = [s for _, s in rewound]
        self._put_back = {id(b) for root, _ in rewound for b in root.buffers()}  # with their modules, to what a replay begins with

    @property
    def ends_with_update(self) -> bool:
        """Whether what it is played for stands behind its backward passes: a weight that the program wrote to or made anew itself."""
        return len(self.entries) > 1 and self.entries[-1].kind in ("write", "call") and any(e.kind in ("backward", "derivative") for e in self.entries)

    @property
    def ends_midway(self) -> bool:
        """Whether it ends at a call whose result the step would have gone on with."""
        return bool(self.entries) and self.entries[-1].kind not in ("backward", "function", "optimizer")

    def until_loss(self) -> Program:
        """Return the same step without its backward passes; the losses they start from are still told."""
        short = copy.copy(self)
        short.skip_backward = True
        return short

    def results(self) -> dict[Slot | Inner, torch.Tensor]:
        """Return what its calls make until the loss: also where the program holds none of it any more, as in a capsule. None where memory is too short.

        Cost: a forward pass.
        """
        short = self.until_loss()
        try:
            with short.still():
                return short.play().made
        except MemoryError:
            return {}

    def changed(self, change: Callable[[], AbstractContextManager[object]]) -> Program:
        """Return the same step as another source would make it."""
        other = copy.copy(self)
        other.change = change
        return other

    def gone_back(self) -> Program:
        """Return a step whose loss the program looked at and then left, with the backward pass that was not made; others as they are."""
        last = self.entries[-1] if self.entries else None
        if last is None or last.kind not in ("call", "write", "module") or last.outputs != 1 or first_backward(self.entries):
            return self
        longer = copy.copy(self)
        loss = Slot(last.number, 0)
        longer.entries = [*self.entries, Entry(last.number + 1, "backward", torch.autograd.backward, (loss,), {}, last.site, True, (), (loss,))]
        return longer

    def frugal(self) -> Program:
        """Return the forward pass without its autograd graph: each value is freed as soon as it was used."""
        short = self.until_loss()
        short.without_graph = True
        return short

    def inexact(self) -> str:
        """Say why a replay is not exact, or nothing."""
        tape = self.recorder.tape
        if tape.overflowed:
            return "the step made more torch calls than the tape holds; its beginning was not kept"
        for entry in self.entries:
            for leaf in entry.reads:
                if isinstance(leaf, Outside):
                    if leaf.changed and id(leaf.tensor) not in self._put_back:
                        return f"a tensor of shape {list(leaf.tensor.shape)} that the step read was changed in place since"
                    if leaf.tensor.requires_grad and node_of(leaf.tensor) is not None:
                        return f"a tensor made by {type(node_of(leaf.tensor)).__name__} came from code the tape does not see"
        if self.guessed or self.recorder.received.refused:
            return self.guessed or self.recorder.received.refused
        return "the step computes with gradients of the step before, which a replay does not have" if _computes_with_left_over(self.entries) else ""

    @contextmanager
    def still(self) -> Iterator[None]:
        """Hold everything that a replay could disturb, starting from the state at the beginning of the step."""
        recorder = self.recorder
        held = [] if self.undo is not None else self.leaves
        undo = self.undo() if self.undo is not None else nullcontext()
        with (
            Stasis(self.roots, held, self.hooks(), recorder.beside.generators.take(), recorder.roots.around(), self._written_to()),
            undo,
            doubled(self.leaves),
            unreplicated(self.roots),
            unmanaged(self.roots) if several() else nullcontext(),
            refused_collectives(),
            torch.autograd.set_multithreading_enabled(False),
            eagerly(),
        ):
            for state in self._rewound:
                state.replay_from()
            recorder.inside += 1
            recorder.replaying = True
            try:
                with self._weights_as_before(), in_own_memory(self.roots), no_output(), no_warnings():  # what a pass prints was printed once
                    yield
            finally:
                recorder.stepped.clear()
                recorder.replaying = False
                recorder.inside -= 1

    def _written_to(self) -> list[Any]:
        """Return all that is written to when the beginning of the step is loaded, be it no part of a module any more: the program may hold it."""
        return [held for state in self._rewound for held in state.kept()]

    def hooks(self) -> list[Any]:
        """Return what the step hangs on its own tensors."""
        return [a for e in self.entries if getattr(e.fn, "__name__", "") == "register_hook" for a in (*e.args, *e.kwargs.values()) if callable(a)]

    @contextmanager
    def _weights_as_before(self) -> Iterator[None]:
        """Put weights and buffers that the step itself writes to back to what they were: the replay writes them again."""
        if not self._written:
            yield
            return
        with torch._C.DisableTorchFunction():  # nothing of this is the program's
            present = [(kept, kept.tensor.detach().clone(), kept.saved, kept.written, kept.version) for kept in self._written.values()]
        with torch.autograd._unsafe_preserve_version_counter(tuple(kept.tensor for kept, *_ in present)):  # type: ignore[attr-defined]
            try:
                for kept, _, saved, *_ in present:
                    if saved is not None and id(kept.tensor) not in self._written_late:
                        _put(saved, kept.tensor)
                for kept, _, saved, *_ in present:  # one tensor may have been read under several versions
                    if saved is not None:
                        kept.saved, kept.written, kept.version = None, False, kept.tensor._version
                yield
            finally:
                for kept, value, saved, written, version in present:
                    _put(value, kept.tensor)
                    kept.saved, kept.written, kept.version = saved, written, version

    def play(self, listener: Listener | None = None) -> Run:
        """Run all entries once. Call inside `still()`."""
        with self.change():
            return self._play(listener)

    def _play(self, listener: Listener | None) -> Run:
        run = Run()
        run.made.update(self.given)
        self.recorder.received.rewind()
        for entry in self.entries:
            stepwise = entry.kind == "function"
            self.recorder.playing = entry
            self.recorder.replayed = (lambda tensors: run.losses.extend(tensors_of(tensors))) if stepwise else None
            if listener is not None:
                listener.entering(entry)
            try:
                self._play_entry(entry, run)
            except Enough:
                return run
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | SystemExit):
                    raise
                let_through(error)
                if out_of_memory(error):
                    traceback.clear_frames(error.__traceback__)  # they hold the values that filled the memory
                    raise MemoryError("replay") from None
                run.error, run.failed_at = error, entry
                if isinstance(error, Refused):
                    self.recorder.received.refused = str(error)
                return run
            finally:
                if listener is not None:
                    listener.leaving(entry)
        return run

    def _play_entry(self, entry: Entry, run: Run) -> None:
        get = functools.partial(_value, run)
        args = [get(a) for a in entry.args]
        kwargs = {k: get(v) for k, v in entry.kwargs.items()}
        for table, name, kept in entry.given:
            table[name] = get(kept)
        if entry.kind in ("backward", "derivative"):
            given = args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))
            run.losses.extend(t for t in tensors_of(given) if t.requires_grad or self.without_graph)
        if entry.rng is not None:
            put_rng(entry.rng)
            put(entry.generators)
        before = take_rng(others=True) if entry.runs_model and entry.rng is not None and entry.rng[2] is None else None
        catcher = _Catcher(entry, run) if entry.wanted else nullcontext()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(entry.grad_enabled and not self.without_graph))
            for device, on, dtype in entry.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on))
            stack.enter_context(catcher)
            if isinstance(entry.fn, torch.nn.Module) and several() and in_flat_shards(entry.fn.modules()):
                raise Refused("the forward pass of `FullyShardedDataParallel`")  # breaking off leaves its flat weights as they are in the midst of it
            result = None if self.skip_backward and entry.kind == "backward" else call_entry(entry, args, kwargs)
        if before is not None and moved(before):
            self.guessed = f"{entry.name} drew from Python's or numpy's random, which it was not known to do: the numbers of the replay are others"
        if entry.kind == "write" and result is None:
            result = args[0]
        if entry.kind == "grad" and result is None and entry.outputs:
            result = _left_over(args[0])
        for index, tensor in enumerate(tensors_of(result)):
            run.made[Slot(entry.number, index)] = tensor
        for inner, (module, name) in (entry.left or {}).items():  # a change that is tried may make other nodes, so that they cannot be counted
            if isinstance(value := module.__dict__.get(name), torch.Tensor):
                run.made[inner] = value


def _called_before_written(entries: list[Entry], written: dict[int, Outside]) -> set[int]:
    """Return the buffers that a module was called with before the step wrote to them: these are put back with the module."""
    found: set[int] = set()
    held: set[int] = set()
    for entry in entries:
        target = target_of(entry) if entry.kind == "write" else None
        if id(target) in written and isinstance(target, Outside) and id(target.tensor) in held:
            found.add(id(target.tensor))
        elif isinstance(entry.fn, torch.nn.Module):
            held.update(map(id, entry.fn.buffers()))
    return found


def _put(value: torch.Tensor, place: torch.Tensor) -> None:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        write_back(value, place if place.shape != value.shape else place.detach())


def _computes_with_left_over(entries: list[Entry]) -> bool:
    """Whether gradients of an earlier step go into this one; to look at them and to zero them is no computing."""
    left: set[int] = set()
    fresh = True  # nothing has filled or zeroed the gradients yet
    for entry in entries:
        fresh = fresh and entry.kind not in ("backward", "zero", "function")
        name = getattr(entry.fn, "__name__", "")
        reads = any(isinstance(read, Slot) and read.entry in left for read in entry.reads)
        if reads and name not in _SAME and name not in _ZEROING:
            return True
        if (fresh and entry.kind == "grad" and entry.outputs) or (reads and name in _SAME):
            left.add(entry.number)
    return False


def _left_over(leaf: torch.Tensor) -> torch.Tensor:
    """Stand in for the gradient of an earlier step that the program looked at, mostly to zero it: a replay starts without gradients."""
    leaf.grad = torch.zeros_like(leaf)
    return leaf.grad


def _value(run: Run, kept: Any) -> Any:
    """Return what a kept argument stands for. Not a closure: one that calls itself would hold the run's tensors."""
    if isinstance(kept, Slot | Inner):
        return run.made[kept]
    if isinstance(kept, Outside):
        return run.outside(kept)
    if isinstance(kept, Rebuild):
        return kept.build(functools.partial(_value, run))
    if type(kept) is list or type(kept) is tuple:
        return type(kept)([_value(run, v) for v in kept])
    if type(kept) is dict:
        return {k: _value(run, v) for k, v in kept.items()}
    return kept


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out: on the CPU torch raises a plain RuntimeError for it.

    >>> out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    True
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))


def call_entry(entry: Entry, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Make the entry's call. A frame of this function marks the lower end of the user's stack during a replay."""
    if entry.kind == "backward" and hasattr(torch.autograd.graph, "_engine_run_backward"):
        return engine_backward(*args, **kwargs)
    if getattr(entry.fn, "__module__", "") == "torch.autograd" and getattr(entry.fn, "__name__", "") == "grad":
        return engine_grad(entry.fn, *args, **kwargs)
    return eager(entry.fn)(*args, **kwargs)


def engine_grad(grad: Callable[..., Any], outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
                create_graph: bool = False, **more: Any) -> Any:  # fmt: skip
    """Do the same for `torch.autograd.grad` in its common form."""
    plain = not (more.get("is_grads_batched") or more.get("materialize_grads") or more.get("only_inputs") is False)
    ends = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs) if isinstance(inputs, tuple | list) else None
    if not plain or ends is None or not hasattr(torch.autograd.graph, "_engine_run_backward"):
        return grad(outputs, inputs, grad_outputs, retain_graph, create_graph, **more)
    roots = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs)
    given = (grad_outputs,) if isinstance(grad_outputs, torch.Tensor) else tuple(grad_outputs) if grad_outputs is not None else (None,) * len(roots)
    made = torch.autograd._make_grads(roots, given, is_grads_batched=False)
    retain = create_graph if retain_graph is None else retain_graph
    return torch.autograd.graph._engine_run_backward(
        roots, made, retain, create_graph, ends, allow_unreachable=more.get("allow_unused") is True, accumulate_grad=False
    )


def engine_backward(
    tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False, grad_variables: Any = None, inputs: Any = None
) -> None:
    """Do what `torch.autograd.backward` does, without taking function modes off: a recomputed forward pass must see them."""
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    given = grad_tensors if grad_tensors is not None else grad_variables
    grads = (given,) if isinstance(given, torch.Tensor) else tuple(given) if given is not None else (None,) * len(roots)
    made = torch.autograd._make_grads(roots, grads, is_grads_batched=False)
    ends = () if inputs is None else (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    retain = create_graph if retain_graph is None else retain_graph
    torch.autograd.graph._engine_run_backward(roots, made, retain, create_graph, ends, allow_unreachable=True, accumulate_grad=True)


def eager(fn: Any) -> Any:
    """Return the eager original of a compiled module or function, and the module inside a data-parallel wrapper."""
    fn = unwrapped(fn)
    original = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
    return fn if original is None else original


def unwrapped(fn: Any) -> Any:
    """Return the module inside a data-parallel wrapper, or what was given."""
    return fn.module if isinstance(fn, torch.nn.parallel.DistributedDataParallel) else fn


def is_compiled(fn: Any) -> bool:
    """Whether an entry runs compiled code."""
    if eager(fn) is not unwrapped(fn):
        return True
    return isinstance(fn, torch.nn.Module) and any(m._compiled_call_impl is not None for m in fn.modules())


class _Catcher(torch.overrides.TorchFunctionMode):
    """Picks up the tensors that the tape knows by their autograd node.

    From the first replay on they are known by the calls that made them: a change that is tried makes other nodes, and the program the same calls.
    """

    def __init__(self, entry: Entry, run: Run) -> None:
        super().__init__()
        self.entry, self.run, self.start = entry, run, _node_number()
        self.count, self.known = 0, entry.caught
        self.by_node = entry.wanted.difference((self.known or {}).values())
        self.caught = entry.caught = dict(self.known or {})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        name = getattr(func, "__name__", "")
        for place, tensor in enumerate(tensors_of(result, depth=0)):
            key = (self.known or {}).get((self.count, name, place)) or self._by_node(tensor)
            if key is not None:
                self.caught[self.count, name, place] = key
                self.run.made[Inner(self.entry.number, *key)] = tensor
        return result

    def _by_node(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        node = node_of(tensor) if self.by_node and tensor.requires_grad else None
        key = (node._sequence_nr() - self.start, tensor.output_nr) if node is not None else None
        return key if key in self.by_node else None
