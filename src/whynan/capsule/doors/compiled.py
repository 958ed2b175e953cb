"""Functions made by `torch.compile`: recorded as one call, and never traced with our mode on the stack.

A compiled function is held by the program under names of its own, so nothing can be put in its place. Its code is
exchanged instead for one that asks at the door; `remove` puts the code back. Modules need no door: their call is one.
"""

from __future__ import annotations

import functools
import gc
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, Protocol

import torch
from torch._C._dynamo import eval_frame
from torch.compiler import is_compiling
from torch.jit._fuser import optimized_execution

from whynan.capsule.doors.engine import Doors
from whynan.capsule.made import cells
from whynan.capsule.recorder import Recorder
from whynan.capsule.sites import is_torch
from whynan.capsule.unseen import unseen
from whynan.resting import Collections

_ORIGINAL = "_torchdynamo_orig_callable"


class _Compiler:
    """Answers like `torch.compiler` of a version that has no such flag."""

    @property
    def _is_compiling_flag(self) -> bool:
        return is_compiling()


compiler: Any = torch.compiler if hasattr(torch.compiler, "_is_compiling_flag") else _Compiler()  # two calls less at every door


class Plain(Protocol):
    """What stands in places that the compiler guards, and can step aside."""

    def __bool__(self) -> bool: ...
    def plainly(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True, slots=True)
class _Door:
    """What a compiled function was, and who stands at its door: guards of several threads, closed in any order."""

    code: CodeType
    named: Any
    holders: list[CompiledFunctions]


_DOORS: weakref.WeakKeyDictionary[FunctionType, _Door] = weakref.WeakKeyDictionary()


class CompiledFunctions:
    """The compiled functions that have a door of ours."""

    def __init__(self, doors: Doors, aside: Plain) -> None:
        self.doors, self.aside = doors, aside
        self._held: weakref.WeakSet[FunctionType] = weakref.WeakSet()

    def find(self) -> None:
        """Put a door on the functions that were compiled before watching began.

        Cost: one walk over the objects of the process (50 to 100 ms), in a process that has compiled something.
        """
        if _has_compiled():
            for item in gc.get_objects():
                if type(item) is FunctionType and is_compiled_function(item):
                    self.add(item)

    def add(self, function: Any) -> None:
        """Put a door on one function, or stand at the one that is there; a compiled module holds its own."""
        for inner in vars(function).values() if isinstance(function, torch.nn.Module) else ():
            if type(inner) is FunctionType:
                self.add(inner)
        if type(function) is not FunctionType or not is_compiled_function(function) or function in self._held:
            return
        if function not in _DOORS:
            _DOORS[function] = _hang(function)
        _DOORS[function].holders.append(self)
        self._held.add(function)

    def remove(self) -> None:
        """Leave the doors; the last one who leaves puts the code of the function back."""
        for function in list(self._held):
            door = _DOORS[function]
            door.holders.remove(self)
            if not door.holders:
                function.__code__ = door.code
                function.__kwdefaults__ = door.named
                del _DOORS[function]
        self._held.clear()


def _hang(function: FunctionType) -> _Door:
    door = _Door(function.__code__, function.__kwdefaults__, [])
    plain = FunctionType(door.code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    plain.__kwdefaults__ = door.named
    plain.__dict__.update(function.__dict__)
    function.__kwdefaults__ = {"_whynan": functools.partial(_enter, door.holders, plain)}
    function.__code__ = _door_code(door.code)
    return door


def is_compiled_function(item: FunctionType) -> bool:
    """Whether a function is one that `torch.compile` returned, not a wrapper around it nor one that is kept from compilation."""
    held = item.__dict__
    return _ORIGINAL in held and not held.get("_torchdynamo_disable") and is_torch(item.__code__)


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether calls of a module run compiled code."""
    optimized = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    return module._compiled_call_impl is not None or (optimized is not None and isinstance(module, optimized))


@unseen
def _enter(holders: list[CompiledFunctions], plain: FunctionType, *args: Any, **kwargs: Any) -> Any:
    if is_compiling():
        return plain(*args, **kwargs)
    with ExitStack() as stack:
        for holder in holders:
            if holder.aside:
                stack.enter_context(holder.aside.plainly())
        return _recorded(next((h.doors for h in holders if h.doors.recorder.here), None), plain, args, kwargs)


@unseen
def _recorded(doors: Doors | None, plain: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if doors is None:
        return plain(*args, **kwargs)
    recorder = doors.recorder
    optimizer = stepped_by(plain.__dict__[_ORIGINAL])
    if optimizer is None:
        return recorder.opaque("call", plain, plain, args, kwargs)

    def step(_: torch.optim.Optimizer, *given: Any, **named: Any) -> Any:
        return plain(*given, **named)

    return recorder.outermost(doors.step, step, optimizer, args, kwargs)


def stepped_by(function: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer whose step a compiled function is: its bound `step`, or a function that does little else.

    The common forms: `torch.compile(optimizer.step)`, and a function without arguments that calls `optimizer.step()` on
    one optimizer it finds around itself, and does not go back.
    """
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.optim.Optimizer):
        return owner if getattr(function, "__name__", "") == "step" else None
    code = getattr(function, "__code__", None)
    if code is None or code.co_argcount or "step" not in code.co_names or "backward" in code.co_names:
        return None
    around = {*code.co_names, *code.co_freevars}
    held = cells(function)
    seen = [held.get(name) if name in code.co_freevars else function.__globals__.get(name) for name in around]
    optimizers = [o for o in seen if isinstance(o, torch.optim.Optimizer)]
    return optimizers[0] if len(optimizers) == 1 else None


def _has_compiled() -> bool:
    frames = sys.modules.get("torch._dynamo.eval_frame")
    patched = getattr(getattr(getattr(frames, "TorchPatcher", None), "patch", None), "cache_info", None)
    return frames is not None and (patched is None or patched().currsize > 0)  # the first compilation of a process patches torch


@functools.cache
def _door_code(code: CodeType) -> CodeType:
    """Return code with the same free variables that hands its arguments to the door in its defaults."""
    free = code.co_freevars
    made = "".join(f"    {name} = None\n" for name in free)
    outer = f"    nonlocal {', '.join(free)}\n        " if free else ""
    source = f"def make():\n{made}    def door(*args, _whynan, **kwargs):\n    {outer or '    '}return _whynan(*args, **kwargs)\n    return door\n"
    space: dict[str, Any] = {}
    exec(source, space)
    door: CodeType = space["make"]().__code__
    return door.replace(co_filename=code.co_filename, co_name=code.co_name, co_qualname=code.co_qualname, co_firstlineno=code.co_firstlineno)


def skip_frame(function: Any, deep: bool = False) -> None:
    """Keep the compiler from compiling a wrapper of ours by itself, between two graphs; it may still look through it. With `deep`, also what it calls."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is not None and hasattr(eval_frame, "set_code_exec_strategy"):  # what torch's own skip_code does, without importing the compiler
        action = eval_frame._FrameAction
        eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(action.SKIP, action.SKIP if deep else action.DEFAULT))


@contextmanager
def eagerly() -> Iterator[None]:
    """Run compiled modules and functions, also those inside others, as the Python they were made of; TorchScript without what its optimizer joins together."""
    with optimized_execution(False), _without_dynamo() if "torch._dynamo" in sys.modules else nullcontext():
        yield


@contextmanager
def _without_dynamo() -> Iterator[None]:
    raising = any(action == "error" for action, *_ in warnings.filters)  # else none is shown (`no_warnings`), and the filters are left alone
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings() if raising else nullcontext():
        if raising:
            warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")  # ours, that follow the replay
        yield


for _asked in ("here", "outermost", "_below", "goes_back"):  # by wrappers, also between two graphs
    skip_frame(getattr(getattr(Recorder, _asked), "fget", getattr(Recorder, _asked)))
for _asked in ("mine", "replays_here"):
    skip_frame(getattr(Recorder, _asked).fget, deep=True)
skip_frame(Collections._heard, deep=True)  # called wherever Python collects garbage
