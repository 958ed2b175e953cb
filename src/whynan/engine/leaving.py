"""The program itself leaves a bad step: it looked at a value and went on, or it zeroes the gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from whynan.capsule.replay import Program
from whynan.capsule.sorts import Sort, sort_of
from whynan.capsule.tape.entries import Outside
from whynan.capsule.unseen import unseen
from whynan.engine.dropping import Dropping
from whynan.engine.noticing import Noticing
from whynan.engine.session import Session
from whynan.engine.telling import Telling
from whynan.records import LEFT_OUT
from whynan.tripwire.values import Damage, damage_of

_GOES_BACK = frozenset({"backward", "derivative", "function"})


@unseen
class Leaving:
    """Follows such programs."""

    def __init__(self, session: Session, noticing: Noticing, telling: Telling, dropping: Dropping) -> None:
        self.session, self.noticing, self.telling, self.dropping = session, noticing, telling, dropping
        self.zeroed_away = False  # the program dropped the gradients of a bad step; if it steps all the same, that is no turning away
        self.left_alone: Callable[[], None] = lambda: None  # told of each step that the program itself leaves

    def turned_away(self, zeroed: bool = False) -> None:
        """The program saw the bad value itself and left the step: tell it, and begin anew. One that zeroes the gradients may still step."""
        self.leave_zeroed()
        damaged = _damaged_buffers(self.noticing.bad_buffers())
        self.telling.report(note=damaged if zeroed else damaged or LEFT_OUT)
        self.left_alone()
        self.zeroed_away = zeroed
        if not zeroed:
            self.noticing.markers.leave()
        session = self.session
        session.next_step(left=session.recorder.tape.last if zeroed else abs(session.window.entry))

    def has_left(self) -> bool:
        """Whether buffers are bad by a pass that the program has left without our hearing of it (`np.isnan(loss.detach())`): tell it; this step is another.

        Such a pass has a graph and nothing goes back through it, but a value of it was detached, and not for another model; the others alone leave the
        buffers finite.

        Cost: a replay, where there is such a pass.
        """
        session, tape = self.session, self.session.recorder.tape
        kept = tape.needed_for({e.number for e in tape if e.kind in _GOES_BACK})
        handed_on = {read.entry for e in tape if e.runs_model for read in e.reads if not isinstance(read, Outside)}
        cut = {e.number for e in tape if e.number > session.window_start and e.kind == "call" and sort_of(e.fn) is Sort.CUT} - handed_on
        left = {e.number for e in tape.needed_for(cut) if e.runs_model and e.needs_grad and e.number > session.window_start}
        bad = self.noticing.bad_buffers() if kept and left.difference(e.number for e in kept) else []
        program = Program(session.recorder, kept, session.leaves()).until_loss()
        if not bad or _leaves_bad(program, [buffer for _, buffer, _ in bad]):
            return False
        self.telling.report(note=_damaged_buffers(bad))
        self.noticing.markers.leave()
        return True

    def leave_zeroed(self) -> None:
        """A program that zeroed bad gradients has not stepped on them."""
        if self.zeroed_away:
            self.zeroed_away = False
            self.noticing.markers.leave()

    def steps_on(self) -> bool:
        """Whether the program steps on gradients that it zeroed because they were bad; whether that update is left out.

        It is the step that was told already. Momentum and weight decay would still move the weights.
        """
        session = self.session
        if not self.zeroed_away or session.window.backwards:
            return False
        self.zeroed_away = False
        session.step_count -= 1
        if session.budget.observes:
            session.window.told = True
            return False
        session.journal.say_once("whynan: the program zeroes bad gradients and steps on: momentum and weight decay would still move the weights; left out")
        self.dropping.drop()
        return True


def _leaves_bad(program: Program, buffers: list[torch.Tensor]) -> bool:
    """Whether buffers are bad after a replay, or it cannot be made."""
    with program.still():
        run = program.play()
        return run.error is not None or any(damage_of(buffer.detach()) for buffer in buffers)


def _damaged_buffers(bad: list[tuple[str, torch.Tensor, Damage]]) -> str:
    """Say what the forward pass of a step that the program leaves has damaged."""
    if not bad:
        return ""
    more = f" and {len(bad) - 1} more are" if len(bad) > 1 else " is"
    return f"the buffer `{bad[0][0]}`{more} {bad[0][2].kind} from here on: the program leaves the update out, not what the forward pass wrote"
