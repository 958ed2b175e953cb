"""What can be chosen about a watched run, checked once for all ways in."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whynan.capsule.pack import LIMIT
from whynan.errors import UsageError
from whynan.recovery.policy import Budget, parse
from whynan.recovery.spikes import SpikePolicy
from whynan.tripwire.stages import stages_from
from whynan.tripwire.tracking import limits_of

SNAPSHOTS = ("host", "device", "off")


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `whynan.watch` and `whynan run`."""

    policy: str | Sequence[str] = "skip"
    in_a_row: int = 3
    in_total: int = 10
    wall_steps: bool = False  # schedulers go on over dropped steps
    drop_alone: bool = False  # a bad micro-batch is dropped alone, not with its accumulation window
    snapshots: str = "host"  # where the last good state is kept for a rollback
    snapshot_every: int = 100  # in updates
    rewind_data: bool = True  # a rollback takes a loader that can back to the snapshot's batch
    lr_after_rollback: float = 1.0  # factor
    clip_after_rollback: float | None = None  # largest gradient norm from then on
    bad_terms: str = "skip"  # drop: a loss that is a sum goes on without its bad terms
    spike: str = "warn"  # what to do with a finite loss or gradient norm far outside what it was
    rank_timeout: float = 600.0  # seconds to wait for the other ranks when a step is bad
    capsule_limit: int = LIMIT  # bytes of the tensors in a capsule; 0 writes none
    track: Mapping[str, Mapping[str, float]] | None = None  # named values with limits
    save_every: int = 0  # in updates: a checkpoint of everything, below the run directory; 0 writes none
    validate: str | Callable[..., Any] | None = None  # file.py:function or the function
    validate_every: int = 0  # in updates
    expect: str | os.PathLike[str] | Mapping[str, object] | None = None  # stages of health: a file, or what it holds

    def __post_init__(self) -> None:
        for name in ("in_a_row", "in_total"):
            _whole(name, getattr(self, name), 0)
        _whole("snapshot_every", self.snapshot_every, 1)
        for name in ("capsule_limit", "save_every", "validate_every"):
            _whole(name, getattr(self, name), 0)
        self._check_validation()
        if self.snapshots not in SNAPSHOTS:
            raise UsageError(f"snapshots is one of {', '.join(SNAPSHOTS)}, not {self.snapshots!r}")
        for name in ("lr_after_rollback", "clip_after_rollback", "rank_timeout"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise UsageError(f"{name} is a number above 0, not {value!r}")
        if self.bad_terms not in ("skip", "drop"):
            raise UsageError(f"bad_terms is skip or drop, not {self.bad_terms!r}")
        if self.spike not in list(SpikePolicy):
            raise UsageError(f"spike is one of {', '.join(SpikePolicy)}, not {self.spike!r}")
        limits_of(self.track)
        stages_from(self.expect)
        self.budget()

    def _check_validation(self) -> None:
        if bool(self.validate_every) != (self.validate is not None):
            raise UsageError("validate and validate_every belong together: which function, and every how many updates")
        place = self.validate.rpartition(":")[0] if isinstance(self.validate, str) else ""
        if isinstance(self.validate, str) and (not place or (place.endswith(".py") and not os.path.isfile(place))):
            raise UsageError(f"validate is file.py:function or module:function, and {self.validate!r} is not there")
        if self.validate is not None and not isinstance(self.validate, str) and not callable(self.validate):
            raise UsageError(f"validate is a function, not {type(self.validate).__name__}")

    def budget(self) -> Budget:
        """Return a fresh budget."""
        return Budget(parse(self.policy, self.in_a_row), self.in_total)


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name} is a whole number from {least} on, not {value!r}")
