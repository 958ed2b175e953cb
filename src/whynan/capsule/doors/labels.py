"""Labels for a profiler that nobody runs: torch sets two in every step, and each costs as much as several small operations.

`zero_grad`, an optimizer's `step` and a data loader's next batch run inside `record_function`, which goes through the
dispatcher twice whether somebody listens or not. While watching, somebody must listen. A block that begins before a profiler
does is not in its trace either way.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import profiler
from torch.profiler import ExecutionTraceObserver

from whynan.capsule.unseen import unseen

if TYPE_CHECKING:
    from whynan.capsule.doors.interception import Interception

_profiled = torch._C._autograd._profiler_enabled
_monitor = getattr(profiler, "_maybe_cupti_monitor", lambda: None)  # from torch 2.13 on
_FROM_OUTSIDE = "KINETO_USE_DAEMON"  # profilers that another process starts: nothing here knows when


@unseen
def watch_labels(interception: Interception) -> None:
    """Stand where a label begins and ends."""
    if _FROM_OUTSIDE in os.environ:
        return
    label = profiler.record_function
    begin, end, extend, observe = label.__enter__, label.__exit__, label._call_end_callbacks_on_future, ExecutionTraceObserver.start
    with label("") as made:
        unheard = made.record  # ended, which does no harm twice: who takes the doors down inside a block leaves it with this
    observed = False

    @functools.wraps(begin)
    def __enter__(self: Any) -> Any:
        if observed or _profiled() or getattr(_monitor(), "_monitor_singleton", None) is not None:
            return begin(self)  # type: ignore[no-untyped-call]
        self.record = unheard
        return self

    @functools.wraps(end)
    def __exit__(self: Any, *error: Any) -> None:
        if self.record is not unheard:
            end(self, *error)

    @functools.wraps(extend)
    def _call_end_callbacks_on_future(self: Any, future: Any) -> Any:
        if self.record is unheard:
            begin(self)  # type: ignore[no-untyped-call]
        return extend(self, future)

    @functools.wraps(observe)
    def start(self: Any) -> None:
        nonlocal observed
        observed = True  # it listens without being a profiler, and may for the rest of the run
        observe(self)

    interception.replace(label, "__enter__", __enter__)
    interception.replace(label, "__exit__", __exit__)
    interception.replace(label, "_call_end_callbacks_on_future", _call_end_callbacks_on_future)
    interception.replace(ExecutionTraceObserver, "start", start)
