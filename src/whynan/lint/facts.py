"""What is known of a value without running anything: an interval, what made it, whose library it is."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from math import inf

TORCH, UNKNOWN, OTHER = 1, 0, -1
TINY = 1e-30  # stands for "some positive number" where the number itself is not known

SPREADS = frozenset({"std", "var", "range"})
NORMS = frozenset({"norm", "root-sum-squares"})
COUNTS = frozenset({"mask-sum", "count"})
SATURATING = frozenset({"softmax", "sigmoid", "one-minus-sigmoid", "one-minus-softmax", "one-minus-tanh-squared"})


@dataclass(frozen=True, slots=True)
class Fact:
    """A value as the source shows it. `low` and `high` bound it; `kind` names the operation that made it."""

    kind: str = ""
    low: float = -inf
    high: float = inf
    owner: int = UNKNOWN
    number: float | None = None  # a constant, also one that is only a default
    dtype: str = ""  # "float16", "bfloat16", "float32" where the source says so
    node: ast.AST | None = None  # where it was made
    inner: ast.expr | None = None  # the operand it was made from
    masked: bool = False  # -inf was written into some entries
    eased: bool = False  # the author added or clamped something: guarded as far as can be seen
    graph: bool = True  # a gradient can flow through it
    positive: bool = False  # above 0 in mathematics, though it may round to 0

    @property
    def can_be_zero(self) -> bool:
        """0 lies in the interval and nothing was done about it."""
        return self.low <= 0 <= self.high and not self.eased and not (self.positive and self.low >= 0)

    @property
    def nonnegative(self) -> bool:
        return self.low >= 0

    def but(self, **changes: object) -> Fact:
        """A copy with changes."""
        return replace(self, **changes)  # type: ignore[arg-type]


NOTHING = Fact()


def constant(value: float) -> Fact:
    """The fact of a number."""
    return Fact("number", value, value, OTHER, number=value, graph=False)


def join(facts: list[Fact]) -> Fact:
    """What is true of a value that is one of several."""
    if len(facts) == 1:
        return facts[0]
    first = facts[0]
    same = all(f.kind == first.kind for f in facts)
    real = [f for f in facts if f.kind not in ("number", "none")] or facts
    lead = real[0]
    return Fact(
        first.kind if same else lead.kind if all(f.kind == lead.kind for f in real) else "",
        min(f.low for f in facts),
        max(f.high for f in facts),
        max((f.owner for f in real), key=abs),
        number=first.number if all(f.number == first.number for f in facts) else None,
        dtype=first.dtype if all(f.dtype == first.dtype for f in facts) else "",
        node=lead.node,
        inner=lead.inner,
        masked=any(f.masked for f in facts),
        eased=any(f.eased for f in facts),
        graph=any(f.graph for f in facts),
        positive=all(f.positive for f in facts),
    )


def add(a: Fact, b: Fact) -> Fact:
    """The sum of two values."""
    low, high = a.low + b.low, a.high + b.high
    if a.number is not None and b.number is not None:
        return constant(a.number + b.number)
    small, other = (a, b) if is_epsilon(a) else (b, a)
    guarded = is_epsilon(small) and other.kind != "number"
    kind = other.kind if guarded else "one-plus-exp" if _is_one(a, b, "exp") else "sum-of-two"
    low = low if low == low else -inf
    return Fact(
        kind,
        low,
        high if high == high else inf,
        owner(a, b),
        None,
        a.dtype or b.dtype,
        other.node if guarded else None,
        other.inner,
        masked=a.masked or b.masked or a.low == a.high == -inf or b.low == b.high == -inf,
        eased=a.eased or b.eased or guarded,
        graph=a.graph or b.graph,
        positive=(a.positive and b.low >= 0) or (b.positive and a.low >= 0),
    )


def _is_one(a: Fact, b: Fact, kind: str) -> bool:
    return (a.number == 1 and b.kind == kind) or (b.number == 1 and a.kind == kind)


def is_epsilon(fact: Fact) -> bool:
    """A small positive number, or one called eps."""
    return fact.kind == "epsilon" or (fact.number is not None and 0 < fact.number <= 1e-2)


def owner(*facts: Fact) -> int:
    """Whose library the result belongs to: torch wins over numbers, numpy over unknown."""
    if any(f.owner == TORCH for f in facts):
        return TORCH
    if any(f.kind == "foreign" for f in facts) or all(f.owner == OTHER for f in facts):
        return OTHER
    return UNKNOWN


def multiply(a: Fact, b: Fact) -> Fact:
    """The product of two different values."""
    if a.number is not None and b.number is not None:
        return constant(a.number * b.number)
    ends = [_times(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
    number = a if a.number is not None else b if b.number is not None else None
    other = b if number is a else a
    kind = "product"
    if number is not None and number.number != 0:
        kind = other.kind if (number.number or 0) > 0 else "negated"
    elif "mask" in (a.kind, b.kind):
        kind = "masked-product"
    return Fact(
        kind,
        min(ends),
        max(ends),
        owner(a, b),
        None,
        a.dtype or b.dtype,
        other.node if number else None,
        other.inner if number else None,
        a.masked or b.masked,
        (a.eased and b.eased) or (number is not None and other.eased),
        a.graph or b.graph,
        (a.positive or a.low > 0) and (b.positive or b.low > 0),
    )


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def negate(a: Fact) -> Fact:
    """Minus a value."""
    if a.number is not None:
        return constant(-a.number)
    return a.but(kind="negated", low=-a.high, high=-a.low, positive=False)


def divide(a: Fact, b: Fact) -> Fact:
    """A quotient, as far as signs tell."""
    if a.number is not None and b.number:
        return constant(a.number / b.number)
    if b.number:
        return multiply(a, constant(1 / b.number))
    if a.kind in ("shifted", "scaled-cosine"):
        return a  # by a temperature, which is positive wherever this is written
    if a.kind in ("cosine", "unit"):
        return Fact("scaled-cosine", -inf, inf, owner(a, b), None, a.dtype, graph=a.graph)
    if a.low >= 0 and b.low >= 0:
        return Fact("quotient", 0.0, inf, owner(a, b), None, a.dtype or b.dtype, graph=a.graph or b.graph, positive=a.positive or a.low > 0)
    if a.high <= 0 and b.low >= 0:
        return Fact("quotient", -inf, 0.0, owner(a, b), None, a.dtype or b.dtype, graph=a.graph or b.graph)
    return Fact("quotient", -inf, inf, owner(a, b), None, a.dtype or b.dtype, graph=a.graph or b.graph)


def power(a: Fact, b: Fact) -> Fact:
    """A power with the exponent as far as it is known."""
    n = b.number
    if n is None:
        return Fact("power", 0.0 if a.low >= 0 else -inf, inf, owner(a, b), dtype=a.dtype, graph=a.graph)
    if a.number is not None and (a.number > 0 or (a.number and n == int(n))) and abs(n) < 400:
        try:
            return constant(a.number**n)
        except OverflowError:
            return NOTHING
    if n > 0 and n == int(n) and int(n) % 2 == 0:
        return square(a)
    if n == 0.5:
        return root(a)
    return Fact("power", 0.0 if a.low >= 0 else -inf, inf, owner(a, b), dtype=a.dtype, graph=a.graph, eased=a.eased, positive=a.positive)


def square(a: Fact) -> Fact:
    """The square of a value."""
    low = 0.0 if a.low <= 0 <= a.high else min(a.low**2, a.high**2)
    high = max(abs(a.low), abs(a.high))
    kind = "tanh-squared" if a.kind == "tanh" else "square"
    return Fact(
        kind, low, high * high if high < 1e150 else inf, a.owner, dtype=a.dtype, node=a.node, inner=a.inner, eased=a.eased, graph=a.graph, positive=a.positive
    )


def root(a: Fact) -> Fact:
    """The square root of a value."""
    kinds = {"sum-squares": "root-sum-squares", "mean-squares": "root-mean-squares", "var": "std"}
    return Fact(
        kinds.get(a.kind, "root"),
        max(a.low, 0.0) ** 0.5,
        max(a.high, 0.0) ** 0.5,
        a.owner,
        dtype=a.dtype,
        node=a.node,
        inner=a.inner,
        eased=a.eased,
        graph=a.graph,
        positive=a.positive,
    )


def subtract(a: Fact, b: Fact, same_operand: bool) -> Fact:
    """A difference; the maximum minus the minimum of one value is a range."""
    if a.number is not None and b.number is not None:
        return constant(a.number - b.number)
    owned, graph, dtype = owner(a, b), a.graph or b.graph, a.dtype or b.dtype
    if a.kind == "max" and b.kind == "min" and same_operand:
        return Fact("range", 0.0, inf, owned, dtype=dtype, graph=graph, eased=a.eased and b.eased)
    if b.kind == "max" and same_operand:
        return Fact("shifted", -inf, 0.0, owned, dtype=dtype, graph=graph)
    if a.number == 1 and b.kind == "epsilon" and b.number is None:
        return Fact("bound", 0.5, 1 - 1e-6, owned, graph=False)
    low, high = a.low - b.high, a.high - b.low
    kind = "scaled-cosine" if a.kind == b.kind == "scaled-cosine" else "difference"
    if a.number == 1:
        kind = {
            "sigmoid": "one-minus-sigmoid",
            "softmax": "one-minus-softmax",
            "tanh-squared": "one-minus-tanh-squared",
            "probability": "one-minus-probability",
        }.get(b.kind, "one-minus")
    elif a.kind == "mean-squares" and b.kind in ("square", "square-of-mean"):
        kind = "cancelled-variance"
    return Fact(
        kind, low if low == low else -inf, high if high == high else inf, owned, dtype=dtype, graph=graph, inner=b.inner, node=b.node, eased=a.eased and b.eased
    )
