"""What the user asked of a check."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from whynan.forensics.findings import Kind
from whynan.tripwire.stages import Stage

Tick = Callable[[int], None]


def _no_tick(size: int) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Every option of `whynan check` that changes what is looked at."""

    kind: Kind | None = None  # taken for this, whatever it looks like
    expect: Mapping[str, float] = field(default_factory=dict)  # --expect lr=1e-4
    stages: tuple[Stage, ...] = ()  # --expect FILE: stages of health that logs are held to
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # --range tokens=0:151643, both ends belong to it
    padding: float | None = None  # --padding 0: the id that fills rows
    ignored: float = -100  # --ignore-index: the label that does not count
    batch: int = 64  # --batch: how many rows a batch of the training has
    allow: tuple[str, ...] = ()  # --allow PATTERN: names whose values are not looked at
    jobs: int = os.cpu_count() or 1
    tick: Tick = _no_tick  # told how many bytes were read since it was last told; called from any thread
