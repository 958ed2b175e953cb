"""An exception that ends a program: which recorded call it came out of, and which values it complains about."""

from __future__ import annotations

import copy
import traceback
from types import FrameType

import torch

from whynan.capsule.recorder import Recorder
from whynan.capsule.sites import Site, is_torch
from whynan.capsule.tape.entries import Entry
from whynan.tripwire.values import damage_of

_KINDS = (IndexError, RuntimeError, ValueError)
_CHECKS = (AssertionError, RuntimeError, ValueError, ArithmeticError)


def entry_behind(error: BaseException, recorder: Recorder) -> Entry | None:
    """Return the recorded call an exception came out of, or the one that made the NaN that torch refused, or that the program held when it raised."""
    for seen in (error, error.__cause__):
        if isinstance(seen, _KINDS):
            found = _failed(seen, recorder) or _made_blamed(seen, recorder)
            if found is not None:
                return found
    return _unsolved_entry(error, recorder) or _made_held(error, recorder)


def _unsolved_entry(error: BaseException, recorder: Recorder) -> Entry | None:
    """Return the factorisation whose report of failure made the program raise, as a call that raises by itself."""
    for info in unsolved(error):
        slot = recorder.tape.slot_of(info)
        if slot is None:
            return _failed(error, recorder)
        entry = recorder.tape.entries[slot.entry]
        if getattr(entry.fn, "__name__", "").endswith("_ex"):
            raising = copy.copy(entry)
            raising.kwargs = {**entry.kwargs, "check_errors": True}
            return raising
    return None


def _failed(error: BaseException, recorder: Recorder) -> Entry | None:
    failed = recorder.failed
    known = failed is not None and (failed.site is None or passed_through(error, failed.site))  # no site: a probe makes the step itself
    return failed if known else None


def _made_blamed(error: BaseException, recorder: Recorder) -> Entry | None:
    slots = [recorder.tape.slot_of(tensor) for tensor in blamed(error)]
    return next((recorder.tape.entries[slot.entry] for slot in slots if slot is not None), None)


def _made_held(error: BaseException, recorder: Recorder) -> Entry | None:
    """Return what made the NaN that a check of the program or of a library held when it raised (`assert dt > 0`)."""
    frames = _frames(error)
    if not isinstance(error, _CHECKS) or not frames or is_torch(frames[-1].f_code):
        return None
    with torch._C.DisableTorchFunction():  # looked at by us, not called by the program
        held = [v for v in frames[-1].f_locals.values() if isinstance(v, torch.Tensor) and recorder.tape.slot_of(v) is not None]
        slots = [recorder.tape.slot_of(tensor) for tensor in held if damage_of(tensor.detach()).nan]
    return next((recorder.tape.entries[slot.entry] for slot in reversed(slots) if slot is not None), None)


def blamed(error: BaseException) -> list[torch.Tensor]:
    """Return the tensors with NaN that torch's own checks (of a distribution's arguments) held when they raised."""
    found: list[torch.Tensor] = []
    for frame in reversed(_frames(error)):
        if not is_torch(frame.f_code):
            break
        found += [v for v in frame.f_locals.values() if isinstance(v, torch.Tensor) and damage_of(v.detach()).nan]
    return found


def passed_through(error: BaseException, site: Site | None) -> bool:
    """Whether an exception came out of the call at a site; of our own frames nothing is left in its traceback."""
    trace = error.__traceback__
    while trace is not None and site is not None:
        if trace.tb_frame.f_code is site.code and trace.tb_lasti == site.lasti:
            return True
        trace = trace.tb_next
    return False


def unsolved(error: BaseException) -> list[torch.Tensor]:
    """Return the reports (`info` of `cholesky_ex`, `inv_ex` …) that were not 0 where a program raised an exception of its own."""
    frames = _frames(error)
    if not frames or is_torch(frames[-1].f_code):
        return []
    held = frames[-1].f_locals.values()
    with torch._C.DisableTorchFunction():  # looked at by us, not called by the program
        return [v for v in held if isinstance(v, torch.Tensor) and v.dtype is torch.int32 and not v.is_meta and bool(v.any())]


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
