"""What is wrong in a checkpoint, from the statistics of its tensors and the plain values between them.

    tensors ─► finite? meant? ─► signs, head-room, zeros, one value ─┐
    values  ─► counters, gradient scaler, expectations ──────────────┼─► findings, worst first
    notes   ─► what the file would have run ─────────────────────────┘

A rule that cannot tell a fault from a habit stays silent: a false alarm costs the trust in all the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from fnmatch import fnmatchcase

from whynan.forensics.checkpoints.contents import Scalar
from whynan.forensics.checkpoints.counters import judge_counters, judge_scaler, trained_steps
from whynan.forensics.checkpoints.expecting import judge_expectations
from whynan.forensics.checkpoints.roles import Role, in_optimizer, is_first_moment, is_meant, is_second_moment, may_be_constant, may_be_zero, role_of
from whynan.forensics.findings import Finding, Severity, worst_first
from whynan.forensics.wishes import Wishes
from whynan.records import TensorStats, count, number

_CODES = {Role.WEIGHT: "WN601", Role.BUFFER: "WN602", Role.MOMENT: "WN603"}
_ENDS = {
    "float16": 65504.0,
    "complex32": 65504.0,
    "bfloat16": 3.3895e38,
    "float32": 3.4028e38,
    "complex64": 3.4028e38,
    "float64": 1.797e308,
    "complex128": 1.797e308,
}  # without float8, which is scaled to fill its range
_NARROW = 65504.0 / 4
_GARBAGE = 1e18  # no trained weight is that large; memory that was never written often is
_TINY = 1.1754943508222875e-38  # below it float32 is denormal
_DANGER, _MISSING = "dangerous:", "missing:"  # how the readers' notes begin


def judge(values: Mapping[str, Scalar], tensors: Sequence[TensorStats], notes: Sequence[str], wishes: Wishes) -> tuple[Finding, ...]:
    """Return what is wrong, worst first, in the order of the file within one severity.

    >>> found = judge({}, [TensorStats("fc.weight", "float32", (4, 4), nan=2, min=0.1, max=0.4)], (), Wishes())
    >>> print(found[0])
    bad: fc.weight: 2 nan of 16 values (WN601)
    """
    seen = [t for t in tensors if not any(fnmatchcase(t.name, pattern) for pattern in wishes.allow)]
    numbers = {**{k: v for k, v in values.items() if not any(fnmatchcase(k, p) for p in wishes.allow)}, **single_numbers(seen)}
    trained = trained_steps(numbers) > 0
    names = {t.name for t in seen}
    found = [
        *_judge_notes(notes),
        *(f for t in seen for f in _judge_tensor(t, trained, names)),
        *_judge_zeros(seen, trained),
        *_judge_moments(seen, numbers),
        *_judge_emptiness(seen),
        *judge_counters(numbers),
        *judge_scaler(numbers),
        *judge_expectations(numbers, wishes.expect),
    ]
    return worst_first(found)


def single_numbers(tensors: Sequence[TensorStats]) -> dict[str, Scalar]:
    """Counters, rates and scales may be stored as tensors of one value."""
    single = [t for t in tensors if math.prod(t.shape) == 1 and "complex" not in t.dtype]
    return {t.name: math.nan if t.nan else math.inf if t.posinf else -math.inf if t.neginf else t.min for t in single}


def _judge_notes(notes: Sequence[str]) -> Iterator[Finding]:
    for note in notes:
        if note.startswith(_DANGER):
            yield Finding(Severity.BAD, "dangerous-pickle", f"loading it without care would run code: {note.removeprefix(_DANGER).strip()}")
        elif note.startswith(_MISSING):
            yield Finding(Severity.BAD, "missing-tensors", note.removeprefix(_MISSING).strip())
        else:
            yield Finding(Severity.NOTE, "not-looked-into", note)


def is_float(tensor: TensorStats) -> bool:
    """Whether a tensor holds floating-point or complex values."""
    return tensor.dtype.startswith(("float", "bfloat", "complex"))


def _judge_tensor(tensor: TensorStats, trained: bool, beside: Set[str]) -> Iterator[Finding]:
    if not is_float(tensor):
        return
    role = role_of(tensor.name)
    if tensor.nonfinite:
        yield from _judge_nonfinite(tensor, role, trained)
        return
    yield from _judge_sign(tensor, beside)
    if role is not Role.ASIDE:
        yield from _judge_size(tensor, role, trained)
    if role is Role.WEIGHT:
        yield from _judge_constant(tensor)


def _judge_nonfinite(tensor: TensorStats, role: Role, trained: bool) -> Iterator[Finding]:
    if role is Role.COUNTER:
        if math.prod(tensor.shape) == 1:  # judged as a number
            return
        role = Role.MOMENT if in_optimizer(tensor.name) else Role.WEIGHT
    if is_meant(tensor, role):
        return
    damage = [f"{count(n)} {word}" for n, word in ((tensor.nan, "nan"), (tensor.posinf, "inf"), (tensor.neginf, "-inf")) if n]
    message = f"{', '.join(damage)} of {count(_values(tensor))} values"
    if role is Role.ASIDE:
        yield Finding(Severity.NOTE, "not-finite", message, tensor.name)
    elif role is Role.WEIGHT and not trained and largest_of(tensor) > _GARBAGE:
        more = f"; the finite ones reach {number(largest_of(tensor))}, as memory does that was never written"
        yield Finding(Severity.BAD, "never-initialised", message + more, tensor.name, "WN608")
    else:
        yield Finding(Severity.BAD, "not-finite", message, tensor.name, _CODES[role])


def _values(tensor: TensorStats) -> int:
    return math.prod(tensor.shape) * (2 if tensor.dtype.startswith("complex") else 1)


def largest_of(tensor: TensorStats) -> float:
    """The largest finite magnitude in a tensor."""
    return max(abs(tensor.min or 0.0), abs(tensor.max or 0.0))


def _judge_sign(tensor: TensorStats, beside: Set[str]) -> Iterator[Finding]:
    """Sums of squares and variances are never below zero; their root would be NaN."""
    if tensor.min is None or tensor.min >= 0 or tensor.dtype.startswith("complex"):
        return
    if is_second_moment(tensor.name, beside):
        yield Finding(Severity.BAD, "negative-second-moment", f"a mean of squares is {number(tensor.min)}: its root is nan", tensor.name, "WN603")
    elif tensor.name.rsplit(".", 1)[-1] == "running_var":
        yield Finding(Severity.BAD, "negative-variance", f"a running variance is {number(tensor.min)}: its root is nan", tensor.name, "WN602")


def _judge_size(tensor: TensorStats, role: Role, trained: bool) -> Iterator[Finding]:
    largest, end = largest_of(tensor), _ENDS.get(tensor.dtype, math.inf)
    if _is_mask(tensor, end):
        return
    if largest > end / 4:
        left = max(0.0, math.log2(end / largest))
        message = f"reaches {number(largest)}: {left:.1f} doublings left before {tensor.dtype} ends at {number(end)}"
        yield Finding(Severity.SUSPECT, "no-head-room", message, tensor.name)
    elif role is Role.WEIGHT and largest > _GARBAGE and len(tensor.shape) > 1 and trained:
        yield Finding(Severity.SUSPECT, "diverged", f"reaches {number(largest)}: no trained weight is that large", tensor.name, "WN605")
    elif role is Role.WEIGHT and largest > _GARBAGE and len(tensor.shape) > 1:
        message = f"reaches {number(largest)}: it was never given a value (torch.empty), or diverged"
        yield Finding(Severity.SUSPECT, "never-initialised", message, tensor.name, "WN608")
    elif role is Role.WEIGHT and 0 < largest < _TINY and len(tensor.shape) > 1 and tensor.dtype in ("float32", "bfloat16"):
        yield Finding(Severity.SUSPECT, "never-initialised", f"holds nothing but denormals (at most {number(largest)})", tensor.name, "WN608")


def _is_mask(tensor: TensorStats, end: float) -> bool:
    """Whether large values are signs: a bound never updated, or "do not look here" beside zeros, as -1e9 and the end of the range are."""
    if tensor.min is None or tensor.max is None or (tensor.min == tensor.max and largest_of(tensor) > 0.99 * end):
        return tensor.min is not None
    return "mask" in tensor.name.lower() or (tensor.max in (0.0, 1.0) and tensor.min < -_NARROW and tensor.zeros > 0 and not tensor.name.endswith("weight"))


def _is_wide(tensor: TensorStats) -> bool:
    return sum(size > 1 for size in tensor.shape) > 1


def _judge_constant(tensor: TensorStats) -> Iterator[Finding]:
    if _is_wide(tensor) and tensor.min == tensor.max and tensor.min and not may_be_constant(tensor.name):
        yield Finding(Severity.SUSPECT, "one-value", f"all {count(_values(tensor))} values are {number(tensor.min)}", tensor.name)


def _is_zero(tensor: TensorStats) -> bool:
    return tensor.min == 0.0 == tensor.max and not tensor.nonfinite


def _matrices(tensors: Sequence[TensorStats]) -> list[TensorStats]:
    return [t for t in tensors if is_float(t) and len(t.shape) > 1 and math.prod(t.shape) > 1 and role_of(t.name) is Role.WEIGHT]


def _judge_zeros(tensors: Sequence[TensorStats], trained: bool) -> Iterator[Finding]:
    weights = [t for t in _matrices(tensors) if not may_be_zero(t.name, trained=True)]
    dead = [t for t in weights if _is_zero(t)]
    if len(dead) == len(weights) > 1 or (trained and len(dead) == len(weights) == 1):
        several = f"all {count(len(dead))} weights are" if len(dead) > 1 else "the one weight in it is"
        yield Finding(Severity.BAD, "all-zero", f"{several} zero: nothing that was trained is in it", dead[0].name if len(dead) == 1 else "")
        return
    for tensor in dead:
        if _is_wide(tensor) and not may_be_zero(tensor.name, trained):
            yield Finding(Severity.SUSPECT, "all-zero", f"all {count(_values(tensor))} values are zero", tensor.name)


def _judge_moments(tensors: Sequence[TensorStats], numbers: Mapping[str, Scalar]) -> Iterator[Finding]:
    """An optimizer that took steps has seen gradients, unless none ever arrived."""
    first = [t for t in tensors if is_first_moment(t.name)]
    steps = [v for k, v in numbers.items() if k.endswith(".step") and isinstance(v, int | float) and v > 1 and role_of(k) is Role.COUNTER]
    if first and steps and all(_is_zero(t) for t in first):
        yield Finding(Severity.SUSPECT, "no-gradient", f"after {number(max(steps))} steps every first moment is zero: no gradient ever arrived", first[0].name)


def _judge_emptiness(tensors: Sequence[TensorStats]) -> Iterator[Finding]:
    hollow = [t for t in tensors if t.name.endswith("weight") and math.prod(t.shape) == 0 and is_float(t)]
    whole = [t for t in tensors if math.prod(t.shape) and role_of(t.name) is Role.WEIGHT]
    if hollow:
        severity = Severity.SUSPECT if whole else Severity.BAD
        message = f"{count(len(hollow))} weights have no values, as ZeRO-3 leaves them in a model: gather them before saving"
        yield Finding(severity, "no-values", message, hollow[0].name)
