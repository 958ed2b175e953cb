"""Have a failing step diagnosed by the core, and keep it as a capsule where that is wanted."""

from __future__ import annotations

import io
import linecache
import threading
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from whynan.capsule.sites import live_site, positions
from whynan.capsules import LIMIT
from whynan.engine.guard import Guard
from whynan.engine.options import Options
from whynan.errors import TrainingStopped
from whynan.probing.steps import SubjectStep, Values, other_weights
from whynan.records import Incident
from whynan.report.journal import Journal
from whynan.tripwire.values import damage_of


def diagnose(step: SubjectStep, values: Values, run_dir: Path | None = None, keep: bool = False) -> tuple[Incident | None, Path | None]:
    """Run a step once more under the watch of the engine; return its incident, and its capsule where one was written.

    Cost: some ten replays of the step, for the place, the cause and the proof.
    """
    made: list[tuple[Incident | None, Path | None]] = []
    # in a thread of its own no frame of the caller is mistaken for a line of the step, and a watch of the caller's stays open
    worker = threading.Thread(target=lambda: made.append(_diagnosed(step, values, run_dir, keep)), name="whynan-probe")
    worker.start()
    worker.join()
    return made[0] if made else (None, None)


def _diagnosed(step: SubjectStep, values: Values, run_dir: Path | None, keep: bool) -> tuple[Incident | None, Path | None]:
    journal = Journal(run_dir, files=keep, quiet=True)
    guard = Guard(Options(policy="skip", spike="off", snapshots="off", capsule_limit=LIMIT if keep else 0), journal)
    ends = [w for _, w in step.weights] or [v for v in values if v.requires_grad]
    copies = [w.detach().clone() for _, w in step.weights]  # an update that nobody stops must not reach the user's weights
    with other_weights(step, copies), step.still(), redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
        try:
            with guard:
                _watched_step(guard, step, values, ends)
        except (Exception, TrainingStopped):  # noqa: S110 (what can be said of it is in the journal)
            pass
    written = guard.acting.capsules.written
    return (journal.incidents[0] if journal.incidents else None), (written[0] if written else None)


def _watched_step(guard: Guard, step: SubjectStep, values: Values, ends: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(ends, lr=0.0) if ends else None
    guard.attach(*([optimizer] if optimizer is not None else []), *([step.subject.model] if step.subject.model is not None else []))
    loss = step.loss(values)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()


def fingerprint(step: SubjectStep, values: Values) -> tuple[str, str, int]:
    """Return operation, file and line of the first non-finite value: enough to tell whether a failure was met before."""
    mode = _First()
    with step.still():
        try:
            with mode:
                loss = step.loss(values)
                if loss.requires_grad and mode.found is None:
                    ends = [w for _, w in step.weights] or [v for v in values if v.requires_grad]
                    torch.autograd.grad(loss, ends, allow_unused=True)
        except Exception as error:
            return type(error).__name__, str(error)[:80], 0
    return mode.found or ("", "", 0)


class _First(TorchDispatchMode):
    """Remembers the first operation that made a NaN or an infinity of finite values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: tuple[str, str, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.found is None and isinstance(out, torch.Tensor) and "empty" not in func.__name__ and damage_of(out):
            site = live_site(fingerprint.__code__, 1)
            self.found = (str(func), site.code.co_filename if site is not None else "", positions(site)[0] if site is not None else 0)
        return out


def raised_by_user(error: BaseException) -> bool:
    """Whether an exception was raised by a statement of the user's code (a refusal), not by an operation of torch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip()
    return line.startswith(("raise", "assert"))
