"""What to do with a step whose numbers are finite and far outside what they were."""

from __future__ import annotations

from enum import StrEnum


class SpikePolicy(StrEnum):
    """What to do about a spike of the loss or the gradient norm."""

    WARN = "warn"
    SKIP = "skip"
    ROLLBACK = "rollback"
    STOP = "stop"
    OFF = "off"


def on_spike(policy: SpikePolicy, before_update: bool) -> str:
    """Say what is done about a spike; a word as in `Action.taken`.

    On the CPU the numbers are known before the update. On CUDA they are known one step later: the update has been
    applied, so `skip` can only warn there; `rollback` and `stop` act one step late.

    >>> on_spike(SpikePolicy.SKIP, before_update=True), on_spike(SpikePolicy.SKIP, before_update=False)
    ('skipped', 'observed')
    """
    if policy is SpikePolicy.SKIP:
        return "skipped" if before_update else "observed"
    return {SpikePolicy.ROLLBACK: "rolled back", SpikePolicy.STOP: "stopped"}.get(policy, "observed")
