"""What every reader of a log gives: entries, each a few named numbers and what is known of when they were written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from whynan.forensics.logs.names import naming

MOST_NAME = 160
_STEPS = ("global_step", "step", "iteration", "iter", "num_updates", "update", "it", "n_iter", "train_step", "steps", "iterations", "num_steps", "total_steps")
_RANK = {name: rank for rank, name in enumerate(_STEPS)}
_EPOCHS = frozenset({"epoch", "epochs", "ep"})
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)", re.IGNORECASE)


@dataclass(slots=True)
class Entry:
    """A few numbers written together."""

    line: int  # 1-based; 0 where the file has no lines
    values: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    epoch: float | None = None
    total: int | None = None  # M of a counter N/M
    inner: bool = False  # the step counts inside an epoch
    live: bool = False  # a progress bar drawn again: the last one of a step holds
    holes: tuple[str, ...] = ()  # losses that are named and have no value: so some write nan


def to_number(value: object) -> float | None:
    """Return a value as a number, also one written as text; None where it is none.

    >>> [to_number(v) for v in (3, "4.2", "nan", "-Infinity", True, "a", None)]
    [3.0, 4.2, nan, -inf, None, None, None]
    """
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int | str):
        return None
    if isinstance(value, str) and (len(value) > 64 or not _NUMBER.fullmatch(value.strip())):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def entry_of(pairs: Mapping[str, object], line: int = 0) -> Entry:
    """Sort named values into an entry: which one is the step, which the epoch, which are the curves.

    >>> entry = entry_of({"trainer/global_step": 7, "epoch": 1, "loss": "nan"})
    >>> entry.step, entry.epoch, entry.values
    (7, 1.0, {'loss': nan})
    """
    entry = Entry(line)
    best = len(_RANK)
    for name, value in flat(pairs):
        number = value if type(value) is float else to_number(value)
        if number is None:
            if value is None and naming(name).main:
                entry.holes += (name[:MOST_NAME],)
            continue
        rank = _rank(name)
        if rank is None:
            entry.values[name[:MOST_NAME]] = number
        elif rank < 0:
            entry.epoch = number if math.isfinite(number) else None
        elif rank < best and number.is_integer() and abs(number) < 2**62:
            entry.step, best = int(number), rank
    return entry


@lru_cache(maxsize=8192)
def _rank(name: str) -> int | None:
    """Return how well a name says the step, the best 0; -1 for the epoch, None for a curve."""
    last = name.rsplit("/", 1)[-1].strip().lower().lstrip("_").replace(" ", "_")
    return -1 if last in _EPOCHS else _RANK.get(last)


def flat(pairs: Mapping[str, object], before: str = "", depth: int = 4) -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested mappings with their names joined by `/`."""
    for key, value in pairs.items():
        name = f"{before}/{key}" if before else str(key)
        if not isinstance(value, dict):
            yield name, value
        elif depth:
            yield from flat(value, name, depth - 1)
