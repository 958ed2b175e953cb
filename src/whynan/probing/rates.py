"""Whether a learning rate suits this model: a few updates on the sample batch, on copies, and how the loss goes.

Too large: the loss is not finite or rises by orders, while at a smaller rate it does not. Too small: every weight keeps all its bits.
All updates see the same batch and the same random numbers, so dropout is no noise here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from whynan.probing.attacking import Attacks
from whynan.probing.groups import verdict
from whynan.probing.results import Group, Level, Verdict
from whynan.probing.steps import attempt, values_of
from whynan.probing.training import Course, Training, course
from whynan.records import count, number, short_dtype

UPDATES = 8
_LONGER = 4 * UPDATES  # where the loss has risen, and not beyond doubt
# rises, in sizes of the first loss: at the end; at any time; at all times; in a calm course at any time and at its end
_STAYS, _PEAK, _DOUBLE, _HALF, _LITTLE = 10.0, 100.0, 1.0, 0.5, 0.1
_SMALLEST = 0.1  # a first loss below counts as this: one of 1e-6 may well double
_GROWTH, _STEADY = 1000.0, 10.0  # of the norm of all weights: an explosion, and what is still none
_DECADES, _FURTHER = 4, 4  # how far down a better rate is looked for: two tries in each decade, then one
_MOST = 0.9  # of half-precision weights with a gradient, standing still: noted


def verdict_of(attacks: Attacks, training: Training) -> Verdict:
    """Judge the rate.

    Cost: eight steps where it is fine (twice eight under a schedule); where it is not, 32 in doubt and eight for each rate tried, at most 12.
    """
    step = attacks.step
    if not training.rates:
        return Verdict(Group.RATE, "not run", f"{training.who} has no rate that could be read")
    if not attempt(step, values_of(step)).fine:
        return Verdict(Group.RATE, "not run", "the sample step itself is not finite")
    rates, when = training.rates, ""
    went = course(step, training, rates, UPDATES)
    if training.peak > training.rate and not _explodes(went):
        rates, when = training.peaks, ", the highest rate of the schedule without its warm-up"
        went = course(step, training, rates, UPDATES)
    clipped = f", gradients clipped at {number(training.clip)}" if training.clip is not None else ""
    name = f"{UPDATES} updates, {training.who}{clipped}{when}"
    if _rises_at_all(went):
        text = _too_large(attacks, training, rates, went)
        sure = not when and _explodes(went) and (_beyond_doubt(went) or _explodes(course(step, training, rates, _LONGER)))
        if text:
            attacks.note(Group.RATE, name, f"rate {number(max(rates))}: {text}", Level.FINDING if sure else Level.NOTE)
    else:
        _too_small(attacks, name, max(rates), went)
    end = f"to {number(went.losses[-1])} in {len(went.losses) - 1}" if len(went.losses) > 1 else f"and {went.bad}"
    return verdict(attacks, Group.RATE, f"{number(max(rates))}: loss {number(went.losses[0])} {end}, {training.who}")


def _updates(total: int) -> str:
    return f"{total} update{'s' if total > 1 else ''}"


# -- too large --------------------------------------------------------------------------------------------------


def _rises(went: Course) -> list[float]:
    """Return how far each loss lies above the first, in sizes of the first."""
    first = went.losses[0]
    return [(loss - first) / max(abs(first), _SMALLEST) for loss in went.losses[1:]]


def _beyond_doubt(went: Course) -> bool:
    return bool(went.bad) or went.growth > _GROWTH or max(_rises(went)) > _PEAK


def _explodes(went: Course) -> bool:
    """Whether something is not finite, or the weights or the loss grow by orders and do not come back."""
    return bool(went.bad) or went.growth > _GROWTH or _rises(went)[-1] > (-_HALF if max(_rises(went)) > _PEAK else _STAYS)


def _rises_at_all(went: Course) -> bool:
    """Whether there is something to tell: also a loss that rose by orders and fell again, or that doubled at once and stayed."""
    return _explodes(went) or max(_rises(went)) > _PEAK or min(_rises(went)) > _DOUBLE


def _is_calm(went: Course) -> bool:
    moved = went.still < went.graded  # of a rate at which nothing moves nothing is learned
    return moved and not went.bad and went.growth < _STEADY and max(_rises(went)) <= _HALF and _rises(went)[-1] <= _LITTLE


def _too_large(attacks: Attacks, training: Training, rates: tuple[float, ...], went: Course) -> str:
    """Say what happens, and from which rate on it does not; nothing where a loss rises at every rate, as that of an opponent does."""
    largest, low = max(rates), max(rates)
    calm: list[tuple[float, Course]] = []
    for low in _below(largest):
        slower = course(attacks.step, training, tuple(r / largest * low for r in rates), UPDATES)
        calm = [*calm, (low, slower)] if _is_calm(slower) else []
        if len(calm) == 2:  # and the next one below it too
            falls = all(c.losses[-1] < c.losses[0] for _, c in calm)
            words = "neither grows so" if _only_weights_grow(went) else "it falls" if falls else "it does not rise"
            return f"{_told(went)}; from {number(calm[0][0])} down {words}"
    return f"{_told(went)}; no rate down to {number(low)} is better, so most likely it is not the rate" if went.bad else ""


def _below(rate: float) -> Iterator[float]:
    """Yield round rates below one: two in each decade, then one.

    >>> list(_below(0.5))[:4], next(_below(0.003)), len(list(_below(0.5)))
    ([0.3, 0.1, 0.03, 0.01], 0.001, 12)
    """
    if rate <= 0:
        return
    power = math.floor(math.log10(rate) + 1e-9)
    fine = [float(f"{digit}e{power - i}") for i in range(_DECADES + 1) for digit in (3, 1)]
    fine = [r for r in fine if r < rate * 0.99][: 2 * _DECADES]
    yield from fine
    last = math.floor(math.log10(fine[-1]) + 1e-9)
    yield from (float(f"1e{last - i}") for i in range(1, _FURTHER + 1))


def _only_weights_grow(went: Course) -> bool:
    return not went.bad and went.growth > _GROWTH and went.losses[-1] <= went.losses[0]


def _told(went: Course) -> str:
    """Say how the loss went: to where it is beyond all bounds, or else to where it was worst."""
    first, last = number(went.losses[0]), number(went.losses[-1])
    if went.bad == "the loss":
        top = max(v for v in went.losses if math.isfinite(v))
        return f"the loss on one batch goes from {first} {f'over {number(top)} ' if top > went.losses[0] else ''}to {last} in {_updates(len(went.losses) - 1)}"
    if went.bad:
        return f"after {_updates(len(went.losses))} on one batch there is {went.bad}; the loss goes from {first} to {last}"
    if _only_weights_grow(went):
        return f"the norm of all weights grows {number(went.growth)} times in {_updates(UPDATES)} on one batch, the loss goes from {first} to {last}"
    rises = _rises(went)
    place = next((i for i, rise in enumerate(rises, 1) if rise > _PEAK), 1 + rises.index(max(rises)))
    after = f" (after {UPDATES} it is {last})" if went.losses[-1] < went.losses[place] / _STAYS else ""
    return f"the loss on one batch goes from {first} to {number(went.losses[place])} in {_updates(place)}{after}"


# -- too small --------------------------------------------------------------------------------------------------


def _too_small(attacks: Attacks, name: str, rate: float, went: Course) -> None:
    """Say where updates round away: weights that get a gradient and are what they were, bit for bit."""
    if not went.graded:
        return
    types = ", ".join(dict.fromkeys(short_dtype(str(w.dtype)) for _, w in attacks.step.weights))
    if went.still == went.graded:
        text = f"all {count(went.graded)} weights with a gradient keep all their bits ({types}) in {UPDATES} updates"
        attacks.note(Group.RATE, name, f"rate {number(rate)}: {text}: nothing is learned", Level.FINDING)
    elif went.half and went.still >= _MOST * went.graded:
        share = f"{count(went.still)} of {count(went.graded)}"
        attacks.note(Group.RATE, name, f"rate {number(rate)}: {share} weights with a gradient keep all their bits ({types}) in {UPDATES} updates")
