"""Which function of torch a program is in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from whynan.trace.operators import readable

if TYPE_CHECKING:
    from whynan.trace.tracer import Tracer


class CallTracker(TorchFunctionMode):
    """Knows which Python-level torch function is running."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer: Tracer | None = tracer
        self.name = ""
        self.value = -1  # the operation that is what it computes, where a derivative is carried along
        self._names: dict[Any, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer, self.name = self.name, self._names.get(func) or self._names.setdefault(func, readable(func))
        around, self.value = self.value, -1
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if self.tracer is not None:
                self.tracer.call_failed(self.name, args, error)
            raise
        finally:
            self.name, self.value = outer, around
