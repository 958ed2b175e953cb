"""What the user expected to be stored, against what is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from whynan.forensics.checkpoints.contents import Scalar
from whynan.forensics.checkpoints.counters import as_number
from whynan.forensics.checkpoints.roles import Role, role_of
from whynan.forensics.findings import Finding, Severity
from whynan.records import number

_RATE_NAMES = ("lr", "learning_rate")
_BASES = ("initial_lr", "base_lrs")  # what an optimizer and a scheduler start from: a rate that decays differs from it by right
_PEAKS = ("max_lr", "max_lrs")  # of schedules that rise first: there it is the peak that people configure
_NOW = ("lr", "_last_lr")


def judge_expectations(numbers: Mapping[str, Scalar], expect: Mapping[str, float]) -> Iterator[Finding]:
    """Yield a finding for every expectation that the stored numbers do not meet; both numbers are said.

    A name is found by the end of the stored one: `lr` fits `optimizer.param_groups.0.lr`.

    >>> [str(f) for f in judge_expectations({"epoch": 28}, {"epoch": 29})]
    ['suspect: epoch: 28 is stored, 29 was expected']
    """
    for name, wanted in expect.items():
        found = list(_rates(numbers, wanted) if name in _RATE_NAMES else _plain(numbers, name, wanted))
        if not found and not _named(numbers, name) and not (name in _RATE_NAMES and _all_rates(numbers)):
            found = [Finding(Severity.NOTE, "expectation-not-found", f"{number(wanted)} was expected; nothing is stored under that name", name)]
        yield from found


def same(a: float, b: float) -> bool:
    """Whether two numbers are the same but for rounding to float32."""
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-30)


def _named(numbers: Mapping[str, Scalar], name: str) -> dict[str, float]:
    """Return the numbers whose dotted name ends in a name, also as a list: `base_lrs` fits `base_lrs.0`."""
    found = {k: n for k, v in numbers.items() if _fits(k, name) and (n := as_number(v)) is not None}
    return {k: n for k, n in found.items() if role_of(k) is not Role.ASIDE} or found  # what was configured says little of what is used


def _fits(stored: str, name: str) -> bool:
    head, _, last = stored.rpartition(".")
    return any(known == name or known.endswith(f".{name}") for known in ((stored, head) if last.isdigit() else (stored,)))


def _plain(numbers: Mapping[str, Scalar], name: str, wanted: float) -> Iterator[Finding]:
    """Every number of that name must fit, except that `weight_decay` and the like may be 0 in groups meant to be without."""
    stored = _named(numbers, name)
    groups = {k: v for k, v in stored.items() if ".param_groups." in f".{k}"}
    if any(same(v, wanted) for v in groups.values()):
        stored = {k: v for k, v in stored.items() if k not in groups or v != 0}
    for place, value in stored.items():
        if not same(value, wanted):
            yield Finding(Severity.SUSPECT, "not-as-expected", f"{number(value)} is stored, {number(wanted)} was expected", place)


def _all_rates(numbers: Mapping[str, Scalar]) -> dict[str, float]:
    return _collect(numbers, (*_NOW, *_BASES, *_PEAKS, "learning_rate"))


def _collect(numbers: Mapping[str, Scalar], names: Iterable[str]) -> dict[str, float]:
    return {k: v for name in names for k, v in _named(numbers, name).items()}


def _rates(numbers: Mapping[str, Scalar], wanted: float) -> Iterator[Finding]:
    """Compare with the rates a run starts from; where none is stored, with those of the moment."""
    now, peaks = _collect(numbers, _NOW), _collect(numbers, _PEAKS)
    bases = [base for name in _BASES if (base := _named(numbers, name))]
    if any(same(v, wanted) for v in peaks.values()):
        return
    wrong = [base for base in bases if not any(same(v, wanted) for v in base.values())]
    for place, value in {v: (k, v) for base in reversed(wrong) for k, v in list(base.items())[:1]}.values():
        moment = next((f"; the rate of the moment is {_exact(v)}" for v in now.values() if not same(v, value)), "")
        yield _overridden(place, f"the learning rate starts from {_exact(value)}, {_exact(wanted)} was expected{moment}")
    if not bases and now and not any(same(v, wanted) for v in now.values()):
        place, value = next(iter(now.items()))
        yield _overridden(place, f"the learning rate is {_exact(value)}, {_exact(wanted)} was expected")
    if bases and not wrong:
        yield from _above(now, max(v for base in (*bases, peaks) for v in base.values()))


def _above(now: Mapping[str, float], highest: float) -> Iterator[Finding]:
    """Schedules lower a rate from its base; one above every base was set by something else."""
    for place, value in now.items():
        if value > highest * (1 + 1e-6):
            yield _overridden(place, f"the rate of the moment is {_exact(value)}, above every rate it could start from ({_exact(highest)})")
            return


def _overridden(place: str, message: str) -> Finding:
    return Finding(Severity.SUSPECT, "learning-rate", message, place, "WN607")


def _exact(value: float) -> str:
    return f"{value:.6g}"
