"""Keras 3 on torch: its optimizers are not torch's, so their update has a door of its own; and a callback for `fit`."""

from __future__ import annotations

import functools
from typing import Any

import keras

from whynan.capsule.doors.interception import Interception
from whynan.capsule.stack import ELSEWHERE
from whynan.capsule.unseen import leave_out, unseen
from whynan.integrations.sessions import OwnWatch


class WhynanCallback(keras.callbacks.Callback):  # type: ignore[misc]  # keras carries no types
    """Watch `model.fit`: `model.fit(..., callbacks=[WhynanCallback()])`, with `KERAS_BACKEND=torch`.

    Takes the options of `whynan.watch`. Not needed under `whynan run`; there it joins what is watched already. A training that
    is stopped raises `whynan.TrainingStopped` out of `fit`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        if keras.backend.backend() != "torch":
            raise RuntimeError(f"whynan watches torch, and Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=torch before keras is imported")
        self._own = OwnWatch(options)
        self.incidents: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Begin to watch."""
        self._own.end()  # of a training that raised
        self._own.begin(self.model)
        guard = self._own.guard
        self.incidents = guard.journal.incidents if guard is not None else []

    def on_train_end(self, logs: Any = None) -> None:
        """End it; `incidents` stays."""
        self._own.end()


@unseen
def watch_updates(interception: Interception) -> None:
    """Stand at `apply` of Keras optimizers: after a bad backward pass there is no update."""
    doors = interception.doors
    base = keras.optimizers.Optimizer
    owner = next(cls for cls in base.__mro__ if "apply" in vars(cls))
    original = owner.apply
    if getattr(original, "_whynan", None) is interception:
        return

    @functools.wraps(original)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = doors.recorder.outermost(doors.update_by_hand, original, self, args, kwargs)
            return original(self, *args, **kwargs) if result is ELSEWHERE else result
        except BaseException:
            leave_out()
            raise

    apply._whynan = interception  # type: ignore[attr-defined]
    interception.replace(owner, "apply", apply)
