"""The program itself leaves a bad step: it looked at a value and went on, or it zeroes the gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from whynan.capsule.unseen import unseen
from whynan.engine.dropping import Dropping
from whynan.engine.noticing import Noticing
from whynan.engine.session import Session, Window
from whynan.engine.telling import Telling
from whynan.tripwire.values import Damage


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
        self.telling.report(note=_damaged_buffers(self.noticing.bad_buffers()))
        self.left_alone()
        self.zeroed_away = zeroed
        if not zeroed:
            self.noticing.markers.leave()
        session = self.session
        session.step_count += 1
        session.window = Window()
        session.recorder.tape.roll()
        session.window_start = session.recorder.tape.number()

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


def _damaged_buffers(bad: list[tuple[str, torch.Tensor, Damage]]) -> str:
    """Say what the forward pass of a step that the program leaves has damaged."""
    if not bad:
        return ""
    more = f" and {len(bad) - 1} more are" if len(bad) > 1 else " is"
    return f"the buffer `{bad[0][0]}`{more} {bad[0][2].kind} from here on: the program leaves the update out, not what the forward pass wrote"
