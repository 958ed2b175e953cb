"""Buffers in which NaN is a mark ("not seen yet"): the program itself asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from whynan.capsule.replay import Program
from whynan.capsule.tape import memory_of, tensors_of
from whynan.engine.session import Session

ASKS = frozenset({"isnan", "isfinite", "isinf", "nan_to_num", "nanmean", "nansum", "nanmedian", "nanquantile"})  # who calls these knows of NaN


class Markers:
    """Knows which buffers are read by functions that ask for NaN."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._known = WeakTensorKeyDictionary()  # by buffer: whether it is one

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


class _Listener(TorchFunctionMode):
    """Hears which memory is asked for NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").rstrip("_") in ASKS:
            self.asked.update(memory_of(t) for t in tensors_of(args[:1]))
        return func(*args, **(kwargs or {}))
