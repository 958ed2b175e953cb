"""Which step a checkpoint belongs to: by what is in it, else by its name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from whynan.forensics.checkpoints.contents import Scalar
from whynan.forensics.checkpoints.counters import as_number

_STEPS = ("global_step", "global_steps", "step", "steps", "num_updates", "iteration", "iter", "it", "iter_num", "n_iter", "current_step", "step_num")
_EPOCHS = ("epoch", "current_epoch", "epochs", "last_epoch")
_HOMES = ("trainer_state", "trainer_state.json", "state", "train_state", "meta", "info", "extra_state", "progress", "client_state", "app", "trainer")
_LABELLED = re.compile(r"(?:step|iter|global|update|ckpt|checkpoint|epoch|ep|it)[a-z]*[-_=.]?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_STEP_WORD = re.compile(r"(?:step|iter|update)[a-z]*[-_=.]?(\d+)", re.IGNORECASE)


def step_inside(numbers: Mapping[str, Scalar]) -> int | None:
    """Return the step a file says it was saved at, in its outermost counters, else in those of its optimizer.

    >>> step_inside({"trainer_state.global_step": 500, "trainer_state.epoch": 1.5})
    500
    >>> step_inside({"optimizer.state.0.step": 40.0})
    40
    """
    said = _outermost(numbers, _STEPS)
    if said is not None:
        return said
    counted = [as_number(v) for k, v in numbers.items() if re.search(r"(^|\.)state\.(.+)\.step$", k)]
    steps = [int(v) for v in counted if v is not None and math.isfinite(v)]
    return max(steps, default=None)


def epoch_inside(numbers: Mapping[str, Scalar]) -> int | None:
    """Return the epoch a file says it was saved at."""
    return _outermost(numbers, _EPOCHS)


def _outermost(numbers: Mapping[str, Scalar], names: tuple[str, ...]) -> int | None:
    for name in names:
        for path in (name, *(f"{home}.{name}" for home in _HOMES)):
            value = as_number(numbers.get(path))
            if value is not None and math.isfinite(value) and value >= 0:
                return int(value)
    return None


def step_in_name(name: str) -> int | None:
    """Return the number in a name: beside a word for steps, else for epochs, else the last one.

    >>> [step_in_name(n) for n in ("epoch=3-step=2000.ckpt", "checkpoint-500", "model_00012.pt", "resnet50.pt", "last.ckpt")]
    [2000, 500, 12, 50, None]

    What Lightning adds to a name that was taken is no step: `last-v1.ckpt`.
    """
    stem = re.sub(r"(-v\d+)?\.(pth?|ckpt|bin|safetensors|tar|index\.json|npz|t7|pkl)$", "", name, flags=re.IGNORECASE)
    for pattern in (_STEP_WORD, _LABELLED):
        found = pattern.findall(stem)
        if found:
            return int(found[-1][:18])
    digits = _NUMBER.findall(stem)
    return int(digits[-1][:18]) if digits else None


def series_of(name: str) -> str:
    """Return what the names of one series have in common.

    >>> series_of("epoch=3-step=2000.ckpt"), series_of("checkpoint-500")
    ('epoch=#-step=#.ckpt', 'checkpoint-#')
    """
    return re.sub(r"\d+(\.\d+(?=\D))?", "#", name)
