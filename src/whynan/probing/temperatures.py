"""From which value on a scalar that divides or multiplies the argument of an exponential makes the step finite.

A temperature is such a scalar: `softmax(logits / 0.04)`. So is the scale of an attention, and a learned logit scale. It is known by
what is done with it, not by its name. The sample step is run again with the scalar larger or smaller, nothing else changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from whynan.capsule.sites import live_site, positions, shorten
from whynan.probing.attacking import Attacks
from whynan.probing.results import Group
from whynan.probing.steps import SubjectStep, attempt, values_of
from whynan.records import number

MOST_GROUPS = 4  # scalars that are tried; each costs some thirty steps
_WIDEST = 1e4  # how far a scalar is moved
_NEAR = 10.0  # of a step that is finite, only an edge this near is told
_GRID = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 1000.0, _WIDEST)
_HALVINGS = 8
_DIVIDES = frozenset({"__truediv__", "div", "div_", "divide", "divide_", "true_divide", "__itruediv__"})
_MULTIPLIES = frozenset({"__mul__", "__rmul__", "mul", "mul_", "multiply", "multiply_", "__imul__"})
_EXPONENTIALS = frozenset({"softmax", "log_softmax", "exp", "exp_", "exp2", "expm1", "sigmoid", "sigmoid_", "logsumexp", "softmin", "gumbel_softmax"})
_ADDS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "neg", "__neg__"})
_MOVES = frozenset({"view", "reshape", "transpose", "permute", "t", "flatten", "unsqueeze", "squeeze", "chunk", "split", "clone", "contiguous", "__getitem__"})
_KEEPS = _ADDS | _MOVES | {"masked_fill", "masked_fill_", "where", "float", "to", "type", "detach"}


@dataclass(frozen=True, slots=True)
class Scalar:
    """One number that stands before an exponential, at the lines where it does."""

    value: float
    divides: bool
    places: tuple[str, ...]

    @property
    def text(self) -> str:
        """Say it as it is used."""
        return f"{', '.join(self.places)}: {'/' if self.divides else '*'} {number(self.value)}"


@dataclass(frozen=True, slots=True)
class Use:
    """A division or multiplication by one number, met in a run."""

    value: float
    divides: bool
    place: str


def verdict_notes(attacks: Attacks) -> None:
    """Note each scalar whose edge is near, or behind."""
    step = attacks.step
    scalars = scalars_of(step)[:MOST_GROUPS]
    if not scalars:
        return
    if attempt(step, values_of(step)).fine:
        for scalar in scalars:
            edge = _edge(step, [scalar], smaller=True)
            if edge is not None and edge < _NEAR:
                attacks.note(Group.STABILITY, scalar.text, f"finite {_from(scalar, 1 / edge)} on the sample; here {number(scalar.value)}")
        return
    _heal(attacks, step, scalars)


def _heal(attacks: Attacks, step: SubjectStep, scalars: list[Scalar]) -> None:
    """Of a step that is not finite: which scalar alone would make it so, else all together."""
    alone = [(s, edge) for s in scalars if (edge := _edge(step, [s], smaller=False)) is not None]
    for scalar, edge in alone:
        attacks.note(Group.STABILITY, scalar.text, f"the sample step is finite {_from(scalar, edge)}; here {number(scalar.value)}")
    edge = _edge(step, scalars, smaller=False) if len(scalars) > 1 else None
    if edge is not None:
        each = ", ".join(f"{number(s.value)} {_from(s, edge)}" for s in scalars)
        attacks.note(Group.STABILITY, "; ".join(s.text for s in scalars), f"together, the sample step is finite with {each}")


def _from(scalar: Scalar, factor: float) -> str:
    """Say the edge, rounded to the safe side: a divisor is mild where it is large, a factor where it is small."""
    edge = scalar.value * factor if scalar.divides else scalar.value / factor
    power = 10.0 ** (math.floor(math.log10(abs(edge))) - 1)
    away = scalar.divides == (edge > 0)
    rounded = (math.ceil(edge / power) if away else math.floor(edge / power)) * power
    return f"from {rounded:.2g} {'up' if away else 'down'}"


def _edge(step: SubjectStep, scalars: list[Scalar], smaller: bool) -> float | None:
    """Return the factor at which the step turns, at least 1: towards milder values from a bad one, towards harsher ones from a good one."""

    def fine(factor: float) -> bool:
        with _Moved(scalars, 1 / factor if smaller else factor):
            return attempt(step, values_of(step)).fine

    last = 1.0
    for factor in _GRID:
        if fine(factor) is not smaller:
            return _bisected(fine, last, factor, smaller)
        last = factor
    return None


def _bisected(fine: Callable[[float], bool], low: float, high: float, smaller: bool) -> float:
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if fine(middle) is smaller:
            low = middle
        else:
            high = middle
    return low if smaller else high


# -- finding ----------------------------------------------------------------------------------------------------


def scalars_of(step: SubjectStep) -> list[Scalar]:
    """Run the step once and return the scalars that stand before an exponential, those of one value together."""
    seen = _Uses()
    with step.still(), seen:
        try:
            step.loss(values_of(step))
        except Exception:  # whatever the user's code raises: nothing is known then
            return []
    groups: dict[tuple[float, bool], dict[str, None]] = {}
    for use in seen.found:
        groups.setdefault((use.value, use.divides), {})[use.place] = None
    return [Scalar(value, divides, tuple(sorted(places, key=_by_line))) for (value, divides), places in groups.items()]


def _by_line(place: str) -> tuple[str, int]:
    file, _, line = place.rpartition(":")
    return file, int(line or 0)


@dataclass(slots=True)
class _Tagged:
    """Which tensors come from a use, without another operation than moving and adding in between; they are held, so that ids stay theirs."""

    uses: dict[int, tuple[Use, ...]] = field(default_factory=dict)
    held: list[object] = field(default_factory=list)

    def of(self, values: Any) -> tuple[Use, ...]:
        found: dict[Use, None] = {}
        for value in _tensors(values):
            found.update(dict.fromkeys(self.uses.get(id(value), ())))
        return tuple(found)

    def put(self, made: Any, uses: tuple[Use, ...]) -> None:
        for value in _tensors(made) if uses else ():
            self.uses[id(value)] = uses
            self.held.append(value)


class _Uses(TorchFunctionMode):
    """Notes each scalar that divides or multiplies what an exponential is then taken of."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = _Tagged()
        self.found: dict[Use, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        use = _use(name, args)
        if use is not None:
            self.tags.put(made, (*self.tags.of(args), use))
        elif name in _KEEPS:
            self.tags.put(made, self.tags.of([args, list((kwargs or {}).values())]))
        elif name in _EXPONENTIALS:
            self.found.update(dict.fromkeys(self.tags.of(args)))
        return made


class _Moved(TorchFunctionMode):
    """Makes scalars milder by a factor: a divisor larger, a multiplier smaller."""

    def __init__(self, scalars: list[Scalar], factor: float) -> None:
        super().__init__()
        self._wanted = {(s.value, s.divides): frozenset(s.places) for s in scalars}
        self._factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        use = _use(getattr(func, "__name__", ""), args)
        if use is not None and use.place in self._wanted.get((use.value, use.divides), ()):
            place = _scalar_at(args)
            args = tuple(a if i != place else a * (self._factor if use.divides else 1 / self._factor) for i, a in enumerate(args))
        return func(*args, **(kwargs or {}))


def _use(name: str, args: Any) -> Use | None:
    if name not in _DIVIDES and name not in _MULTIPLIES:
        return None
    place = _scalar_at(args)
    if place is None or (name in _DIVIDES and place == 0):
        return None
    value = float(args[place].detach()) if isinstance(args[place], torch.Tensor) else float(args[place])
    if value == 0 or not math.isfinite(value):
        return None
    site = live_site(scalars_of.__code__, 1)
    where = f"{shorten(site.code.co_filename)}:{positions(site)[0]}" if site is not None else ""
    return Use(value, name in _DIVIDES, where)


def _scalar_at(args: Any) -> int | None:
    """Return which of two operands is one number, where the other is a tensor of several."""
    if len(args) < 2:
        return None
    wide = [isinstance(a, torch.Tensor) and a.numel() > 1 for a in args[:2]]
    if sum(wide) != 1:
        return None
    place = wide.index(False)
    value = args[place]
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return place if plain or (isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()) else None


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
