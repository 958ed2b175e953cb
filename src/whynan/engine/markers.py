"""Buffers whose NaN are not this step's: a mark ("not seen yet") that the program itself asks for, or left by a step that the program left."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from whynan.capsule.replay import Program
from whynan.capsule.tape.facts import memory_of
from whynan.capsule.tape.nested import tensors_of
from whynan.engine.session import Session
from whynan.tripwire.values import damage_of

ASKS = frozenset({"isnan", "isfinite", "isinf", "nan_to_num", "nanmean", "nansum", "nanmedian", "nanquantile"})  # who calls these knows of NaN


class Markers:
    """Knows which buffers are read by functions that ask for NaN, and which were bad before."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._known = WeakTensorKeyDictionary()  # by buffer: whether it is one
        self._left = WeakIdKeyDictionary()  # by module: the names of its buffers that a step which the program left has damaged

    def is_one(self, buffer: torch.Tensor) -> bool:
        """Whether the step in progress asks which values of a buffer are NaN.

        Cost: a replay, once per buffer that is not finite.
        """
        if buffer not in self._known:
            session = self.session
            program = Program(session.recorder, list(session.recorder.tape), session.leaves()).until_loss()
            listener = _Listener()
            with program.still(), listener:
                program.play()
                self._known[buffer] = memory_of(buffer) in listener.asked
        return bool(self._known[buffer])

    def leave(self) -> None:
        """The program leaves a bad step, and with it what the forward pass wrote: that is no fault of the steps after it."""
        for state in self.session.recorder.roots.current():
            for module, name in state.leave():
                self._left.setdefault(module, set()).add(name)

    def is_left(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer has been bad since a step that the program left."""
        return any(module._buffers.get(name) is buffer for module, names in self._left.items() for name in names)

    @property
    def any_left(self) -> bool:
        """Whether there are such."""
        return bool(self._left)

    def look_again(self) -> None:
        """Forget those that are finite again."""
        for module, names in list(self._left.items()):
            bad = {name for name in names if (buffer := module._buffers.get(name)) is not None and damage_of(buffer.detach())}
            if bad:
                self._left[module] = bad
            else:
                del self._left[module]


class _Listener(TorchFunctionMode):
    """Hears which memory is asked for NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").rstrip("_") in ASKS:
            self.asked.update(memory_of(t) for t in tensors_of(args[:1]))
        return func(*args, **(kwargs or {}))
