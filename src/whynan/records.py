"""What flows from room to room: plain, frozen records without torch.

    TensorStats ─┐
    Span ────────┼─► Origin ─┐
                 │  Symptom ─┼─► Incident ─► report
                 └─ Cause ───┤
                    Remedy ──┤
                    Action ──┤
  Stage, Excerpt, ───────────┘
  Histogram, ModuleState
                    Notice ───────────► warnings.jsonl

Every record turns into JSON that contains no bare NaN: non-finite numbers are written as strings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

SCHEMA = 1
LEFT_OUT = "the program itself leaves this step out: no update is made with it"  # the evidence of a loss that it looked at and turned away from
FAR_OFF = ("finite, but absurd: ", "finite, but the gradient is absurd: ")  # how a remedy is told whose replay is finite and far from what was before
DEAD = ("WN601", "WN608")  # codes of a weight that was bad before the step
DAMAGED = (*DEAD, "WN602", "WN603")  # of any state that was: skipping cannot help


class Phase(StrEnum):
    """Where in a step the damage was born."""

    INPUT = "input"
    PARAMETER = "parameter"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Confidence(StrEnum):
    """How sure a verdict is."""

    PROVEN = "proven"
    SUSPECTED = "suspected"


class Kind(StrEnum):
    """What kind of non-finite value was seen."""

    NAN = "nan"
    INF = "inf"


@dataclass(frozen=True, slots=True)
class TensorStats:
    """One tensor in one line: finite statistics first, damage last."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zeros: int = 0
    min: float | None = None
    max: float | None = None

    @property
    def nonfinite(self) -> int:
        """Number of NaN and infinite values."""
        return self.nan + self.posinf + self.neginf

    def line(self) -> str:
        """Say the tensor in one line.

        >>> TensorStats("x", "float32", (32, 10), nan=4, zeros=213, min=-313.6, max=409.3).line()
        'f32[32, 10]  min -313.6  max 409.3  zeros 213  nan 4!'
        """
        words = [f"{short_dtype(self.dtype)}[{', '.join(map(str, self.shape))}]" if self.shape else short_dtype(self.dtype)]
        single = math.prod(self.shape) == 1
        if single and not self.nonfinite and self.min is not None:
            words.append(number(self.min))
        elif self.min is not None and self.max is not None:
            words += [f"{label} {text}" for label, text in zip(("min", "max"), told_apart(self.min, self.max), strict=True)]
        if self.zeros and not single:
            words.append(f"zeros {self.zeros}")
        damage = (("nan", self.nan), ("inf", self.posinf), ("-inf", self.neginf))
        words += [f"{label} {count}!" if not single else f"{label}!" for label, count in damage if count]
        return "  ".join(words)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of source: 1-based lines, 0-based columns as Python counts them."""

    file: str
    line: int
    end_line: int = 0
    column: int = 0
    end_column: int = 0
    function: str = ""
    code: str = ""
    label: str = ""
    indent: int = -1  # white space before `code` in the file; -1: not known

    @property
    def known(self) -> bool:
        """Whether the place is known at all."""
        return bool(self.file) and self.line > 0

    @property
    def place(self) -> str:
        """File and line, or cell and line.

        >>> Span("train.py", 11).place, Span("In [3]", 7).place
        ('train.py:11', 'In [3], line 7')
        """
        return f"{self.file}, line {self.line}" if self.file.startswith("In [") else f"{self.file}:{self.line}"


NOWHERE = Span("", 0)


@dataclass(frozen=True, slots=True)
class Symptom:
    """What the tripwire saw."""

    place: str  # loss, gradient, parameter, buffer, optimizer state, exception
    kind: str  # nan, inf, or the exception's name
    name: str
    detail: str = ""


def is_of_scale(symptom: Symptom) -> bool:
    """Whether what is bad is the scale of a gradient scaler; a weight may be called so, too."""
    return symptom.place == "scaler" and symptom.name == "scale"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the damage was born, with the values seen there."""

    phase: Phase
    span: Span
    module: str = ""
    op: str = ""
    exact: bool = True
    note: str = ""
    inputs: tuple[TensorStats, ...] = ()
    output: TensorStats | None = None
    samples: tuple[int, ...] = ()
    from_: tuple[Span, ...] = ()

    @property
    def doubt(self) -> str:
        """Why the place is not exact, and what would make it so."""
        way = "" if "exact answer" in self.note else "; for an exact answer put the step in a function marked @guard.step"
        return f"not exact: {self.note}{way}"


@dataclass(frozen=True, slots=True)
class Cause:
    """The verdict: one code, with its evidence in the incident's own numbers."""

    code: str
    slug: str
    title: str
    confidence: Confidence
    evidence: tuple[str, ...] = ()
    label: str = ""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change the user can paste, and what the replay of the failing step said of it."""

    title: str
    diff: str = ""
    safe: bool = False
    result: str = "not tried"  # proven | not proven (it helped, as far as the step was recorded) | failed | not tried
    effect: str = ""
    alive: bool = True  # false: it stops the gradient at some elements, as a clamp does
    only: str = ""  # where alone it changes results (`above 80`): a bound that healthy steps never came to


@dataclass(frozen=True, slots=True)
class Action:
    """What was done about it."""

    policy: str
    taken: str
    streak: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Experiment:
    """One question put to the replay, and its answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Stage:
    """One operation on the way the damage took from its origin to the symptom."""

    role: str  # argument | forward | origin | carried | symptom
    op: str
    phase: str = ""
    module: str = ""
    span: Span = NOWHERE
    value: TensorStats | None = None  # of its result, where it was kept
    note: str = ""  # what else is known of the result
    left_out: int = 0  # operations before this one that are not listed


@dataclass(frozen=True, slots=True)
class Histogram:
    """How the values of one tensor are spread; `edges` has one more than `counts`."""

    name: str
    dtype: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    logarithmic: bool = False  # the bars are decades of the magnitude, negative ones first; zeros stand apart
    zeros: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0


@dataclass(frozen=True, slots=True)
class ModuleState:
    """One module of the model in the failing step."""

    name: str
    kind: str
    dtype: str = ""  # of its output
    largest: float | None = None  # largest finite magnitude of its output
    bad_output: bool = False
    weight_dtype: str = ""
    weight_largest: float | None = None
    bad_weight: bool = False
    bad_gradient: bool = False

    @property
    def bad(self) -> bool:
        """Whether the damage reached it."""
        return self.bad_output or self.bad_weight or self.bad_gradient


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Lines of a source file around a span."""

    file: str
    first: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Incident:
    """One failing step, from symptom to action."""

    step: int
    rank: int
    time: str
    symptom: Symptom
    origin: Origin
    cause: Cause
    remedies: tuple[Remedy, ...] = ()
    experiments: tuple[Experiment, ...] = ()
    action: Action = field(default_factory=lambda: Action("observe", "observed"))
    path: tuple[Stage, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    modules: tuple[ModuleState, ...] = ()
    source: tuple[Excerpt, ...] = ()
    terms: tuple[TensorStats, ...] = ()  # what the loss is the sum of
    inside: tuple[TensorStats, ...] = ()  # the named values of the function where it was born

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from whynan.report import cells, terminal

        return cells.page(terminal.diagnosis(self))

    def to_json(self) -> dict[str, Json]:
        """Return the object that `incidents.jsonl` holds, by the contract in the design."""
        origin = self.origin
        span = origin.span
        return {
            "schema": SCHEMA,
            "step": self.step,
            "rank": self.rank,
            "time": self.time,
            "symptom": jsonable(self.symptom),
            "origin": {
                "phase": str(origin.phase),
                **_span_json(span),
                "module": origin.module,
                "op": origin.op,
                "exact": origin.exact,
                "note": origin.note,
                "inputs": [jsonable(s) for s in origin.inputs],
                "output": jsonable(origin.output),
                "samples": list(origin.samples),
                "from": [{**_span_json(s), "label": s.label} for s in origin.from_],
            },
            "cause": jsonable(self.cause),
            "remedies": [jsonable(r) for r in self.remedies],
            "experiments": [jsonable(e) for e in self.experiments],
            "action": jsonable(self.action),
            "path": jsonable(self.path),
            "histograms": jsonable(self.histograms),
            "modules": jsonable(self.modules),
            "source": jsonable(self.source),
            "terms": jsonable(self.terms),
            "inside": jsonable(self.inside),
        }


class NoticeKind(StrEnum):
    """What an early warning is about."""

    SPIKE = "spike"
    HEADROOM = "headroom"
    LIMIT = "limit"
    STILL = "still"


@dataclass(frozen=True, slots=True)
class Notice:
    """An early warning: every value is still finite, and one of them is not where it should be."""

    kind: NoticeKind
    step: int
    name: str
    value: float | None
    text: str
    rank: int = 0
    time: str = ""
    severe: bool = True  # worth a line at once; a mild spike is only written down

    def to_json(self) -> dict[str, Json]:
        """Return the object that `warnings.jsonl` holds.

        >>> Notice(NoticeKind.LIMIT, 7, "alpha", 1.5, "alpha is 1.5").to_json()["kind"]
        'limit'
        """
        return {"schema": SCHEMA, **{f.name: jsonable(getattr(self, f.name)) for f in fields(self)}}


def _span_json(span: Span) -> dict[str, Json]:
    return {
        "file": span.file,
        "line": span.line,
        "end_line": span.end_line or span.line,
        "column": span.column,
        "end_column": span.end_column,
        "function": span.function,
        "code": span.code,
        "indent": span.indent,
    }


def jsonable(value: object) -> Json:
    """Turn a record into JSON values; NaN and infinities become strings.

    >>> jsonable({"loss": float("inf"), "step": 3})
    {'loss': 'inf', 'step': 3}
    """
    if value is None or isinstance(value, bool | str | int):
        return str(value) if isinstance(value, StrEnum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
    if isinstance(value, Mapping):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if is_dataclass(value):
        return {f.name.rstrip("_"): jsonable(getattr(value, f.name)) for f in fields(value)}
    return str(value)


def dumps(value: object) -> str:
    """Write one JSON line that every JSON reader accepts."""
    return json.dumps(jsonable(value), allow_nan=False, ensure_ascii=False)


def number_of(value: object) -> float | None:
    """Return a number of Python's, numpy's or torch's as one of Python's; nothing for words, switches, None, tuples and tensors of several.

    The groups of an optimizer hold all of these: a rate of None is one that it finds itself.

    >>> number_of(1), number_of(None), number_of("auto"), number_of((1e-3, 1e-4)), number_of(True)
    (1.0, None, None, None, None)
    """
    if value is None or isinstance(value, bool | str | bytes | complex):
        return None
    try:
        return float(value.detach() if hasattr(value, "detach") else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def number(value: float) -> str:
    """Print a number as a person would.

    >>> [number(v) for v in (0.0, 71904.0, 0.35, 1e-45, float("nan"), -2.5e19)]
    ['0', '71904', '0.35', '1e-45', 'nan', '-2.5e+19']
    """
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e7:
        return str(int(value))
    return f"{value:.4g}"


def told_apart(low: float, high: float) -> tuple[str, str]:
    """Print two numbers with as many digits as tell them apart.

    >>> told_apart(1.0, 1.00001287), told_apart(0.25, 0.25)
    (('1.00000', '1.00001'), ('0.25', '0.25'))
    """
    first, second = number(low), number(high)
    for digits in range(5, 18) if first == second and low != high else ():
        if (first := f"{low:#.{digits}g}") != (second := f"{high:#.{digits}g}"):
            break
    return first, second


def count(value: int) -> str:
    """Print a count with thin groups: 71904 as `71 904`.

    >>> count(1234567)
    '1 234 567'
    """
    return f"{value:,}".replace(",", " ")


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def short_dtype(dtype: str) -> str:
    """Shorten a dtype's name.

    >>> short_dtype("torch.bfloat16"), short_dtype("bool")
    ('bf16', 'bool')
    """
    name = dtype.removeprefix("torch.")
    head = name.rstrip("0123456789")
    return _SHORT[head] + name[len(head) :] if head in _SHORT else name
