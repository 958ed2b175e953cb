"""Transformers' Trainer: a callback for scripts that choose it, and what to know about its log when a step is bad."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from whynan.integrations.sessions import OwnWatch

HIDES = (
    "whynan: the Trainer's log hides this loss: logging_nan_inf_filter=True logs the mean of the other steps in its place;"
    " TrainingArguments(logging_nan_inf_filter=False) shows it"
)
STAYS = (
    "whynan: the Trainer adds up the loss for its log and this one is not finite: the loss of a step that is left out is taken out of that sum again"
    " and counts as 0 in its mean; under other policies its log says nan from here on; metrics.jsonl has the losses"
)


class WhynanCallback(TrainerCallback):  # type: ignore[misc]  # transformers carries no types
    """Watch `Trainer.train()`: `Trainer(..., callbacks=[WhynanCallback()])`.

    Takes the options of `whynan.watch`. Not needed under `whynan run`; there it joins what is watched already. A training that
    is stopped raises `whynan.TrainingStopped` out of `train()`.
    """

    def __init__(self, **options: Any) -> None:
        self._own = OwnWatch(options)
        self.incidents: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        """Begin to watch; the optimizer is there and nothing was trained yet."""
        self._own.end()  # of a training that raised
        self._own.begin(model, *([optimizer] if optimizer is not None else []))
        guard = self._own.guard
        self.incidents = guard.journal.incidents if guard is not None else []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End it; `incidents` stays."""
        self._own.end()


def about_log(frame: FrameType | None = None) -> str:
    """Say what the log of the Trainer that runs now makes of a bad loss; nothing if none runs."""
    trainer = _running_trainer(frame or sys._getframe(1))
    if trainer is None:
        return ""
    return HIDES if getattr(trainer.args, "logging_nan_inf_filter", False) else STAYS


def _running_trainer(frame: FrameType | None) -> Any:
    from transformers import Trainer

    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name in ("_inner_training_loop", "train") else None
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    return None
