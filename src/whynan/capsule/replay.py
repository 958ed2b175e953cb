"""Play a tape again: the same calls with the same values, random state and switches, leaving no trace.

The player runs in the thread that asks, with the backward pass on the same thread, so that what happens has one order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from whynan.capsule.recorder import Recorder
from whynan.capsule.state import Stasis, put_rng
from whynan.capsule.tape import Entry, Inner, Outside, Rebuild, Slot, leaves, tensors_of

_node_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


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

    def get(self, ref: Slot | Inner | Outside) -> torch.Tensor | None:
        """Return the replayed tensor, or the outside one itself."""
        return ref.tensor if isinstance(ref, Outside) else self.made.get(ref)


class Program:
    """Something that can be run again: a piece of tape with the state it started from.

    `targets` are the loss tensors and `leaves` the tensors that gradients end in.
    """

    def __init__(
        self,
        recorder: Recorder,
        entries: list[Entry],
        leaves_: list[torch.Tensor],
    ) -> None:
        self.recorder = recorder
        self.entries = entries
        self.leaves = leaves_
        self.roots = list({id(e.fn): e.fn for e in entries if isinstance(e.fn, torch.nn.Module)}.values())
        self.roots += [r for r in recorder.roots() if all(r is not x for x in self.roots)]
        self._rewound = [s for root, s in recorder.states.values() if any(root is r for r in self.roots)]

    def inexact(self) -> str:
        """Say why a replay is not exact, or nothing."""
        tape = self.recorder.tape
        if tape.overflowed:
            return "the step made more torch calls than the tape holds; its beginning was not kept"
        for entry in self.entries:
            for leaf in leaves((entry.args, entry.kwargs)):
                if isinstance(leaf, Outside):
                    if leaf.changed:
                        return f"a tensor of shape {list(leaf.tensor.shape)} that the step read was changed in place since"
                    if leaf.tensor.grad_fn is not None and leaf.tensor.requires_grad:
                        return f"a tensor made by {type(leaf.tensor.grad_fn).__name__} came from code the tape does not see"
        return ""

    @contextmanager
    def still(self) -> Iterator[None]:
        """Hold everything that a replay could disturb, starting from the state at the beginning of the step."""
        recorder = self.recorder
        with Stasis(self.roots, self.leaves), torch.autograd.set_multithreading_enabled(False):
            for state in self._rewound:
                state.replay_from()
            recorder.inside += 1
            recorder.replaying = True
            try:
                yield
            finally:
                recorder.replaying = False
                recorder.inside -= 1

    def play(self, listener: Listener | None = None) -> Run:
        """Run all entries once. Call inside `still()`."""
        run = Run()
        for entry in self.entries:
            stepwise = entry.kind == "function"
            self.recorder.replayed = (lambda tensors: run.losses.extend(tensors_of(tensors))) if stepwise else None
            if listener is not None:
                listener.entering(entry)
            try:
                self._play_entry(entry, run)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt | SystemExit | MemoryError):
                    raise
                run.error, run.failed_at = error, entry
                return run
            finally:
                if listener is not None:
                    listener.leaving(entry)
        return run

    def _play_entry(self, entry: Entry, run: Run) -> None:
        def get(kept: Any) -> Any:
            if isinstance(kept, Slot | Inner):
                return run.made[kept]
            if isinstance(kept, Outside):
                return kept.value()
            if isinstance(kept, Rebuild):
                return kept.build(get)
            if type(kept) is list or type(kept) is tuple:
                return type(kept)([get(v) for v in kept])
            if type(kept) is dict:
                return {k: get(v) for k, v in kept.items()}
            return kept

        args = [get(a) for a in entry.args]
        if entry.kind == "write" and entry.args and isinstance(entry.args[0], Outside):
            args[0] = args[0].detach().clone()
        kwargs = {k: get(v) for k, v in entry.kwargs.items()}
        if entry.kind in ("backward", "derivative"):
            run.losses.extend(tensors_of(args[0] if args else kwargs.get("tensors", kwargs.get("outputs"))))
        if entry.rng is not None:
            put_rng(entry.rng)
        catcher = _Catcher(entry, run) if entry.wanted else nullcontext()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(entry.grad_enabled))
            for device, on, dtype in entry.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=on))
            stack.enter_context(catcher)
            result = call_entry(entry, args, kwargs)
        if entry.kind == "write" and result is None:
            result = args[0]
        for index, tensor in enumerate(tensors_of(result)):
            run.made[Slot(entry.number, index)] = tensor


def call_entry(entry: Entry, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Make the entry's call. A frame of this function marks the lower end of the user's stack during a replay."""
    return eager(entry.fn)(*args, **kwargs)


def eager(fn: Any) -> Any:
    """Return the eager original of a compiled module or function, and the module inside a data-parallel wrapper."""
    if isinstance(fn, torch.nn.parallel.DistributedDataParallel):
        fn = fn.module
    original = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
    return fn if original is None else original


def is_compiled(fn: Any) -> bool:
    """Whether an entry runs compiled code."""
    if eager(fn) is not fn:
        return True
    return isinstance(fn, torch.nn.Module) and any(m._compiled_call_impl is not None for m in fn.modules())


class _Catcher(torch.overrides.TorchFunctionMode):
    """Picks up the tensors that the tape knows by their autograd node."""

    def __init__(self, entry: Entry, run: Run) -> None:
        super().__init__()
        self.entry, self.run, self.start = entry, run, _node_number()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_of(result, depth=0):
            node = tensor.grad_fn if tensor.requires_grad else None
            if node is not None:
                key = (node._sequence_nr() - self.start, tensor.output_nr)
                if key in self.entry.wanted:
                    self.run.made[Inner(self.entry.number, *key)] = tensor
        return result

