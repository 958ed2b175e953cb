"""Search for a small change of inputs or weights that breaks a step, led by the hazardous operations (as GRIST does)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.linalg import LinAlgError  # type: ignore[attr-defined]

from whynan.probing.boxes import FAR, Box, input_box, is_free, like, weight_box
from whynan.probing.hazards import Hazard, hazards
from whynan.probing.inputs import Input
from whynan.probing.moves import Move, longer, moves
from whynan.probing.shrinking import shrink
from whynan.probing.steps import Outcome, Step, Values, attempt, judged, other_weights, values_of

ROUNDS = 24  # steps towards one hazard
SIZES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.001)  # of the span of the range
WEIGHTS = ("weights", "far weights")
BEYOND = (10.0, 1e3, 1e6)  # factors on the ranges once nothing was found inside them


@dataclass(frozen=True, slots=True)
class Broken:
    """A change that breaks the step."""

    how: str  # the move, or the operation that was driven
    kind: str  # inputs | weights; beyond | far weights: outside the ranges
    values: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...] | None
    outcome: Outcome
    attempts: int = 0
    seconds: float = 0.0
    factor: float = 1.0  # on the ranges, where they were left

    @property
    def inside(self) -> bool:
        """Whether inputs stayed in their ranges and weights near what they were."""
        return self.kind in ("inputs", "weights")


@dataclass(slots=True)
class Search:
    """One search with its budget."""

    step: Step
    seconds: float = 30.0
    say: Callable[[str], None] = lambda text: None
    attempts: int = 0
    known: Callable[[Values, Values | None], bool] = lambda values, weights: False  # whether a failure was met before
    _begin: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.seconds - (time.monotonic() - self._begin)

    def healthy(self) -> bool:
        """Whether the sample itself is fine: there is nothing to search where it is not."""
        return self._try(values_of(self.step)).fine

    def run(self) -> Broken | None:
        """Try simple changes, then follow gradients: inputs in their ranges, weights near theirs, then beyond the ranges."""
        for phase in (self._by_moves, self._by_inputs, self._by_weights, self._by_pairs, self._outside, self._beyond, self._far_weights):
            found = phase()
            if found is not None:
                return self._smallest(found)
            if self.left <= 0:
                self.say("search: the budget is spent")
                return None
        return None

    def _smallest(self, found: Broken) -> Broken:
        values, weights = shrink(self.step, found.values, found.weights, self._breaks, lambda: self.left > -2.0)
        outcome = self._try(values, weights)
        return Broken(found.how, found.kind, values, weights, outcome, self.attempts, time.monotonic() - self._begin, found.factor)

    # -- phases -------------------------------------------------------------------------------------------------

    def _by_moves(self) -> Broken | None:
        self.say("search: simple changes of the batch")
        return self._first(m for m in moves(self.step.inputs) if m.inside)

    def _by_inputs(self) -> Broken | None:
        box = input_box(self.step.inputs, 1.0)
        return self._descend(box, "inputs", 1.0, 0.4) if box is not None else None

    def _by_weights(self) -> Broken | None:
        box = weight_box(self.step.weights)
        return self._descend(box, "weights", 1.0, 0.4) if box is not None else None

    def _by_pairs(self) -> Broken | None:
        """Two simple changes at once, of different inputs."""
        self.say("search: two changes at once")
        single = [m for m in moves(self.step.inputs) if m.inside and not m.reshapes]
        return self._first(_pairs(single, values_of(self.step)), share=0.4)

    def _outside(self) -> Broken | None:
        """Simple changes that leave the ranges: zeros where there were none, much longer sequences."""
        return self._first((m for m in (*moves(self.step.inputs), *longer(self.step.inputs)) if not m.inside), "beyond")

    def _far_weights(self) -> Broken | None:
        box = weight_box(self.step.weights, FAR)
        return self._descend(box, "far weights", FAR, 1.0) if box is not None else None

    def _beyond(self) -> Broken | None:
        for factor in BEYOND:
            found = self._first(_scaled(self.step.inputs, factor), "beyond", factor)
            box = input_box(self.step.inputs, factor)
            if found is None and box is not None:
                found = self._descend(box, "beyond", factor, 0.5)
            if found is not None or self.left <= 0:
                return found
        return None

    def _first(self, candidates: Iterator[Move], kind: str = "inputs", factor: float = 1.0, share: float = 1.0) -> Broken | None:
        until = self.left * (1 - share)
        for move in candidates:
            if self.left <= until:
                return None
            outcome = self._try(move.values)
            if self._wanted(outcome, move.values, None):
                return Broken(move.name, kind, move.values, None, outcome, factor=factor)
        return None

    # -- gradient -----------------------------------------------------------------------------------------------

    def _descend(self, box: Box, kind: str, factor: float, share: float) -> Broken | None:
        """Drive one hazardous operation after the other, the nearest first; each from the sample."""
        until = self.left * (1 - share)
        targets = self._targets(box, kind)
        self.say(f"search: {len(targets)} hazardous operations, by gradient on the {kind}")
        for number, operation in targets:
            found = self._drive(box, number, kind, until)
            if found is not None:
                values, weights, outcome = found
                return Broken(operation, kind, tuple(values), None if weights is None else tuple(weights), outcome, factor=factor)
            if self.left <= until:
                return None
        return None

    def _targets(self, box: Box, kind: str) -> list[tuple[int, str]]:
        """Return the hazards that depend on the variables, one of each operation in turn, the nearest of its kind first."""
        groups: dict[str, list[tuple[float, int]]] = {}
        with self._at(box.start, kind) as (values, leaves):
            loss = self._loss(values)
            for hazard in hazards(loss) if loss is not None and loss.requires_grad else []:
                if hazard.aim.requires_grad and any(g is not None for g in _gradient(hazard.aim.sum(), leaves)):
                    groups.setdefault(hazard.operation, []).append((hazard.value(), hazard.number))
        order: list[tuple[int, str]] = []
        ranked = {op: sorted(found) for op, found in groups.items()}
        depth = max(map(len, ranked.values()), default=0)
        for place in range(min(depth, 12)):
            order += [(found[place][1], op) for op, found in ranked.items() if place < len(found)]
        return order

    def _drive(self, box: Box, number: int, kind: str, until: float) -> tuple[Values, Values | None, Outcome] | None:
        point = box.start
        best = float("inf")
        for _ in range(ROUNDS):
            if self.left <= until:
                return None
            directions = self._directions(box, point, number, kind)
            if not directions:
                return None
            better: list[torch.Tensor] | None = None
            for candidate in directions:
                value, result = self._look(candidate, number, kind)
                if result is not None:
                    return result
                if value < best - 1e-9:
                    best, better = value, candidate
            if better is None:
                return None
            point = better
        return None

    def _directions(self, box: Box, point: list[torch.Tensor], number: int, kind: str) -> list[list[torch.Tensor]]:
        with self._at(point, kind) as (values, leaves):
            loss = self._loss(values)
            found = [h for h in hazards(loss) if h.number == number] if loss is not None and loss.requires_grad else []
            if not found:
                return []
            slopes = _gradient(found[0].nearest(), leaves)
            newton = _newton(found[0], leaves, point)
        steps = [p if g is None else torch.sign(g).nan_to_num() for p, g in zip(point, slopes, strict=True)]
        made = []
        for size in SIZES:
            made.append(
                box.project([p if g is None else p - size * s * (hi - lo) for p, g, s, lo, hi in zip(point, slopes, steps, box.low, box.high, strict=True)])
            )
        return [m for m in [*made, *map(box.project, newton)] if all(bool(torch.isfinite(t).all()) for t in m)]

    def _look(self, point: list[torch.Tensor], number: int, kind: str) -> tuple[float, tuple[Values, Values | None, Outcome] | None]:
        """Run a step at a point; return how near the hazard is, or the failure."""
        self.attempts += 1
        with self._at(point, kind) as (values, _):
            loss = self._loss(values)
            if loss is None:
                return float("inf"), None
            outcome = judged(self.step, loss, values)
            if is_failure(outcome):
                plain = [like(v.detach(), i.value) for v, i in zip(values, self.step.inputs, strict=True)]
                weights = point if kind in WEIGHTS else None
                again = self._try(plain, weights)
                if self._wanted(again, plain, weights):
                    return float("-inf"), (plain, weights, again)
            near = [h for h in hazards(loss) if h.number == number] if loss.requires_grad and not outcome.broken else []
            return (near[0].value() if near else float("inf")), None

    def _loss(self, values: Values) -> torch.Tensor | None:
        try:
            return self.step.loss(values)
        except MemoryError:
            raise
        except Exception:  # the user's code refuses this point
            return None

    def _at(self, point: list[torch.Tensor], kind: str) -> _At:
        return _At(self.step, point, kind)

    def _try(self, values: Values, weights: Values | None = None) -> Outcome:
        self.attempts += 1
        with other_weights(self.step, weights):
            return attempt(self.step, values)

    def _breaks(self, values: Values, weights: Values | None) -> bool:
        return self._wanted(self._try(values, weights), values, weights)

    def _wanted(self, outcome: Outcome, values: Values, weights: Values | None) -> bool:
        return is_failure(outcome) and not self.known(values, weights)


def is_failure(outcome: Outcome) -> bool:
    """Whether a step broke: a value that is not finite, or a matrix that torch refuses to decompose."""
    return outcome.broken or isinstance(outcome.error, LinAlgError)


class _At:
    """A point of the search put in place: float inputs as leaves, or weights."""

    def __init__(self, step: Step, point: list[torch.Tensor], kind: str) -> None:
        self.step, self.point, self.kind = step, point, kind

    def __enter__(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        step = self.step
        self._still = step.still()
        self._weights = other_weights(step, self.point if self.kind in WEIGHTS else None)
        self._weights.__enter__()
        self._still.__enter__()
        if self.kind in WEIGHTS:
            return values_of(step), [w for _, w in step.weights]
        leaves = [p.detach().clone().requires_grad_() for p in self.point]
        free = iter(leaves)
        return [next(free) if is_free(i) else i.value for i in step.inputs], leaves

    def __exit__(self, *reason: object) -> None:
        self._still.__exit__(None, None, None)
        self._weights.__exit__(None, None, None)


def _gradient(aim: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    try:
        return list(torch.autograd.grad(aim, leaves, allow_unused=True, retain_graph=True))
    except RuntimeError:
        return [None] * len(leaves)


def _newton(hazard: Hazard, leaves: list[torch.Tensor], point: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Go to, and a little past, the zero of the operand by a Newton step: an exact zero is hit only so."""
    if hazard.root is None or not hazard.root.requires_grad:
        return []
    flat = hazard.root.flatten()
    nearest = flat[flat.detach().abs().argmin()]
    slopes = _gradient(nearest, leaves)
    square = sum(float(g.double().square().sum()) for g in slopes if g is not None)
    if not 0 < square < float("inf"):
        return []
    length = float(nearest.detach()) / square
    return [[p if g is None else p - times * length * g for p, g in zip(point, slopes, strict=True)] for times in (1.0, 1.05)]


def _pairs(single: list[Move], sample: list[torch.Tensor]) -> Iterator[Move]:
    for a, first in enumerate(single):
        for second in single[a + 1 :]:
            changed = [[v is not s for v, s in zip(m.values, sample, strict=True)] for m in (first, second)]
            if not any(x and y for x, y in zip(*changed, strict=True)):
                both = tuple(v if c else w for v, w, c in zip(first.values, second.values, changed[0], strict=True))
                yield Move(f"{first.name}, {second.name}", both, True)


def _scaled(inputs: Sequence[Input], factor: float) -> Iterator[Move]:
    """All float inputs, each alone, one row, one value, made larger by a factor."""
    floats = [n for n, i in enumerate(inputs) if is_free(i)]
    for chosen in [floats] * (len(floats) > 1) + [[n] for n in floats]:
        for word, whole in (("", True), ("a row of ", False)):
            made = [i.value for i in inputs]
            for number in chosen:
                old = inputs[number].value
                new = old.detach().clone()
                if whole or not new.dim():
                    new = new * factor
                else:
                    new[0] = new[0] * factor
                made[number] = like(new, old)
            yield Move(f"{word}{' and '.join(inputs[n].name for n in chosen)} times {factor:g}", tuple(made), False)
