"""Counters and gradient scalers in a checkpoint: numbers that can only go one way."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from whynan.forensics.checkpoints.contents import Scalar
from whynan.forensics.checkpoints.roles import Role, in_optimizer, role_of
from whynan.forensics.findings import Finding, Severity
from whynan.records import number

_SCALES = ("scale", "_scale", "cur_scale", "loss_scale")
_BESIDE_A_SCALE = ("growth_factor", "backoff_factor", "growth_interval", "_growth_tracker", "growth_tracker", "scale_factor", "scale_window", "unskipped")
_TRACKERS = ("_growth_tracker", "growth_tracker", "unskipped")
_FROM_ZERO = ("num_batches_tracked", "n_averaged")  # others say -1 before they began
_AHEAD = ("_step_count", "n_averaged")  # count before the first step
_RATES = ("lr", "initial_lr", "weight_decay", "momentum", "eps")


def as_number(value: Scalar) -> float | None:
    """Return a number that is not a truth value, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value > 0 or -1)


def trained_steps(numbers: Mapping[str, Scalar]) -> float:
    """Return how many steps the file says were taken; 0 where it does not say.

    >>> trained_steps({"optimizer.state.0.step": 12.0, "epoch": 1})
    12.0
    """
    said = [as_number(v) for k, v in numbers.items() if role_of(k) is Role.COUNTER and k.rsplit(".", 1)[-1] not in _AHEAD]
    return max((v for v in said if v is not None and math.isfinite(v)), default=0.0)


def judge_counters(numbers: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Yield counters below zero or not finite, rates that are none, and layers that counted otherwise than the rest."""
    for name, stored in numbers.items():
        value, last = as_number(stored), name.rsplit(".", 1)[-1]
        if value is None:
            continue
        if role_of(name) is Role.COUNTER and (not math.isfinite(value) or value < (0 if last in _FROM_ZERO or in_optimizer(name) else -1)):
            yield Finding(Severity.BAD, "bad-counter", f"the counter is {number(value)}", name)
        elif last in _RATES and ".param_groups." in f".{name}" and (not math.isfinite(value) or value < 0):
            yield Finding(Severity.BAD, "bad-rate", f"the optimizer's {last} is {number(value)}", name)
        elif last in ("loss", "train_loss") and not math.isfinite(value) and role_of(name) is not Role.ASIDE:
            yield Finding(Severity.SUSPECT, "bad-loss", f"saved with a loss of {number(value)}", name)
    yield from _disagreeing(numbers)


def _disagreeing(numbers: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Layers of one model count the same batches; where they do not, it is worth knowing and no fault by itself."""
    for last, what in (("num_batches_tracked", "layers"), ("step", "optimizer states")):
        said = {k: v for k, s in numbers.items() if k.endswith(f".{last}") and (last != "step" or in_optimizer(k)) and (v := as_number(s)) is not None}
        low, high = min(said, key=said.__getitem__, default=""), max(said, key=said.__getitem__, default="")
        if said and said[low] != said[high]:
            yield Finding(Severity.NOTE, "counters-differ", f"{what} disagree: {number(said[low])} here, {number(said[high])} in {high}", low)


def judge_scaler(numbers: Mapping[str, Scalar]) -> Iterator[Finding]:
    """Yield loss scales that collapsed: below 1 the scaler makes gradients smaller, the opposite of its task."""
    for name, stored in numbers.items():
        value = as_number(stored)
        if value is None or not _is_scale(name, numbers):
            continue
        if not math.isfinite(value) or value <= 0:
            yield Finding(Severity.BAD, "loss-scale", f"the loss scale is {number(value)}: every scaled gradient is lost", name, "WN606")
        elif value < 1:
            calm = any((as_number(v) or 0) > 0 for k, v in numbers.items() if k in _siblings(name, _TRACKERS))
            halved = f"{math.log2(65536 / value):.0f} halvings below the usual start"
            said = f"the loss scale is {number(value)}, {halved}: the gradients overflowed step after step"
            yield Finding(Severity.SUSPECT if calm else Severity.BAD, "loss-scale", said, name, "WN606")


def _siblings(name: str, names: tuple[str, ...]) -> set[str]:
    head = name.rpartition(".")[0]
    return {f"{head}.{n}" if head else n for n in names}


def _is_scale(name: str, numbers: Mapping[str, Scalar]) -> bool:
    *heads, last = name.split(".")
    if last not in _SCALES:
        return False
    return not _siblings(name, _BESIDE_A_SCALE).isdisjoint(numbers) or any("scaler" in h.lower() for h in heads[-2:])
