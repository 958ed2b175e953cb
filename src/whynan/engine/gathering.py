"""What a diagnosis needs of a run: the calls to replay, the optimizers, what was seen of the steps before."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from whynan.capsule.replay import Program
from whynan.capsule.sites import take_site
from whynan.capsule.snapshot import Snapshot
from whynan.capsule.tape.entries import Entry, Outside, dependencies
from whynan.capsule.tape.facts import memory_of
from whynan.capsule.unseen import unseen
from whynan.diagnosis import Case
from whynan.engine.apart import is_put, on_gradient
from whynan.engine.diagnosing import one_line
from whynan.engine.session import Session
from whynan.errors import let_through
from whynan.records import Symptom
from whynan.recovery.place import rank_here

ENDS = ("backward", "function", "derivative", "clip", "grad", "zero")  # what a step is replayed for


@unseen
def gather(session: Session, symptom: Symptom, optimizer: Any, scaler: Any, program: Program | None = None, step: int | None = None) -> Case:
    """Gather what a diagnosis needs; where that fails, the case says so."""
    try:
        return _gathered(session, symptom, optimizer, scaler, program, step)
    except Exception as error:
        let_through(error)
        session.journal.internal_error(error, watching=True)
        nothing = Program(session.recorder, [], [])
        return Case(session.step_count if step is None else step, symptom, nothing, rank=rank_here(), failed=one_line(error))


@unseen
def _gathered(session: Session, symptom: Symptom, optimizer: Any, scaler: Any, program: Program | None, step: int | None) -> Case:
    if program is None:
        entries = entries_for(session, symptom)
        program = Program(session.recorder, entries, session.leaves(), _undo(entries, optimizer))
    step = session.step_count if step is None else step
    return Case(
        step=step,
        symptom=symptom,
        program=program,
        optimizers=session.optimizers,
        optimizer=optimizer,
        scaler=scaler,
        clip=session.clip,
        history=_history(session, step, optimizer),
        site=take_site(2),
        made_at=session.made_at.get(id(optimizer)),
        rank=rank_here(),
        loss=session.window.loss if step == session.step_count and scaler is None else None,
        backwards=session.window.backwards if step == session.step_count else 0,
        evaluation=session.window.evaluations if step == session.step_count and session.stepping else 0,
        healthy={kept.step: Program(session.recorder, kept.entries, program.leaves) for kept in session.earlier.before(step)},
    )


def _history(session: Session, step: int, optimizer: Any) -> list[dict[str, float]]:
    """Return the metrics of the training that a step is part of: one that was over before says nothing about it."""
    since = 0 if optimizer is None else session.trainings.since(step, optimizer)
    return [row for row in session.journal.history() if row["step"] >= since]


def _undo(entries: list[Entry], optimizer: Any) -> Callable[[], Snapshot] | None:
    return functools.partial(Snapshot, optimizer, gradients=True) if any(e.kind == "optimizer" for e in entries) else None


def entries_for(session: Session, symptom: Symptom) -> list[Entry]:
    """Return the calls to replay for a symptom of the step in progress."""
    tape, entry = session.recorder.tape, session.window.entry
    if session.function is not None:
        return [*tape.needed_for(set(dependencies(session.function))), session.function]
    if entry < 0:
        return tape.needed_for({-entry})
    if entry and symptom.place in ("loss", "exception"):
        return tape.needed_for({entry})
    ends = {e.number for e in tape if e.kind in ENDS or (e.kind == "write" and on_gradient(tape, e))}
    averaged = {n for n in ends if (tape.entries[n].kind == "write" or is_put(tape.entries[n])) and _from_others(session, n)}
    ends = ends - averaged | (session.recorder.received.own & tape.entries.keys() if averaged else set())
    if symptom.place == "buffer":  # written by a forward pass that the loss need not depend on
        ends |= {e.number for e in tape if e.runs_model and e.number > session.window_start}  # those of the step before are kept for its loss
    return [_as_gradients(e) if averaged and e.number in ends else e for e in tape.needed_for(ends)] if ends else list(tape)


def _as_gradients(entry: Entry) -> Entry:
    """Return a call of `torch.autograd.grad` whose results the ranks have averaged as what it is: a step's way back."""
    if entry.kind != "call" or getattr(entry.fn, "__module__", "") != "torch.autograd" or getattr(entry.fn, "__name__", "") != "grad":
        return entry
    derivative = copy.copy(entry)
    derivative.kind = "derivative"
    return derivative


def _from_others(session: Session, number: int) -> bool:
    """Whether an entry reads what a collective gave: averaged gradients are not this rank's own."""
    recorder = session.recorder
    given = recorder.received.places
    reads = (leaf for e in recorder.tape.needed_for({number}) for leaf in e.reads) if given else ()
    return any(isinstance(leaf, Outside) and memory_of(leaf.tensor) in given for leaf in reads)
