"""Gradients that a program writes to after they were averaged over the ranks: what it makes there, the others need not have.

Averaged gradients are the same on all ranks, so all know of a bad value in them. One that the program itself makes in them
(noise, clipping by hand, a division by a norm) can be on one rank alone.
"""

from __future__ import annotations

import math

from whynan.capsule.tape.entries import Entry, Slot, target_of
from whynan.capsule.tape.tape import Tape
from whynan.engine.session import Session, parameters_of
from whynan.records import Incident
from whynan.tripwire.checks import gradients, total_norm


class Apart:
    """Knows what the program does with averaged gradients before the update.

    Cost: one pass over the gradients in a step in which the program asks for one of them; nothing else.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.wanted = True  # whether it matters: not for an optimizer whose ranks ask each other at each step
        self.left: Incident | None = None  # this rank alone has left out an update; the others hear of it by its next gradients

    def gradient_read(self) -> None:
        """The program asks for a gradient, and may be about to write to it: look at all of them as they were averaged."""
        window = self.session.window
        if self.wanted and window.several and window.backwards and window.averaged is None:
            norm = total_norm([g for o in self.session.optimizers for g in gradients(parameters_of(o))])
            window.averaged = math.nan if norm is None else norm

    def were_finite(self) -> bool:
        """Whether the averaged gradients are known to have been finite before the program got hold of them."""
        averaged = self.session.window.averaged
        return averaged is not None and math.isfinite(float(averaged))

    def writes(self) -> bool:
        """Whether the program has written to averaged gradients in this step."""
        tape = self.session.recorder.tape
        last = max((e.number for e in tape if e.kind == "backward"), default=0)
        return any(e.number > last and (is_put(e) or (e.kind == "write" and on_gradient(tape, e))) for e in tape)


def is_put(entry: Entry) -> bool:
    """Whether an entry puts another tensor in the place of a gradient."""
    return entry.kind == "grad" and getattr(entry.fn, "__name__", "") == "__set__" and entry.args[-1] is not None


def on_gradient(tape: Tape, entry: Entry) -> bool:
    """Whether an entry writes to a gradient, or to a part of one."""
    target = target_of(entry)
    if isinstance(target, list) and target:
        target = target[0]  # `torch._foreach_…`, as `clip_grad_value_` writes
    if not isinstance(target, Slot):
        return False
    made = tape.entries.get(target.entry)
    return made is not None and (made.kind == "grad" or (made.kind in ("write", "call") and on_gradient(tape, made)))
