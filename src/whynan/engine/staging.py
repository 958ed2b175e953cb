"""Stages of health in the loop: the numbers that are written anyway are held to what the user expects of this stretch of steps."""

from __future__ import annotations

from whynan.engine.session import Session
from whynan.tripwire.stages import Stage, StageWatch
from whynan.tripwire.tracking import Heard, Tracker


class Staging:
    """Feeds a `StageWatch` from the journal and says what it finds where limits of `track` are said."""

    def __init__(self, session: Session, stages: tuple[Stage, ...], outputs: Heard | None = None) -> None:
        self.session = session
        self.watch = StageWatch(stages, live=True)
        self._trackers = {s.name: Tracker({name: b.track for name, b in s.tracked.items()}, outputs) for s in stages if s.tracked}
        self._said = 0
        session.journal.each_step = self.numbers

    def numbers(self, step: int, loss: float | None, norm: float | None, lr: float | None, scale: float | None) -> None:
        """Take what was written of a step."""
        notices = self.watch.see(step, {"loss": loss, "grad_norm": norm, "lr": lr, "scale": scale})
        if len(self.watch.said) > self._said:
            self._say()
        for notice in notices:
            self.session.journal.warning(notice)

    def state(self, wait: bool = False) -> None:
        """Look at the values that are named in the stage of now; at the end, close."""
        session = self.session
        stage = next((s for s in self.watch.stages if s.holds_step(session.step_count - wait)), None)
        tracker = self._trackers.get(stage.name) if stage is not None else None
        for notice in tracker.look(session.step_count, session.recorder.roots.modules(), session.optimizers, wait) if tracker is not None else ():
            session.journal.warning(notice if notice.value is None else self.watch.tracked(notice))
        if wait:
            self.watch.close()
            self._say()

    def _say(self) -> None:
        for line in self.watch.said[self._said :]:
            self.session.journal.say(f"whynan: {line}")
        self._said = len(self.watch.said)
