"""What speaks against a change that makes a step finite: what else it moves, starves or rewards, and where its gradient is no slope."""

from __future__ import annotations

import math

from whynan.causes.catalogue import Scene
from whynan.causes.facts import VIEWS, counted, divides
from whynan.causes.fixes import Fix
from whynan.causes.lab import Lab, Outcome
from whynan.causes.lasting import BOUND
from whynan.causes.stopped import Stopped
from whynan.causes.swapping import Put
from whynan.records import number

_LINEAR = VIEWS | {"add", "sub", "rsub", "mul", "div", "sum", "mean", "stack", "cat"}
FAR_FROM_WIDE = 0.1  # by how much a loss may be off that of float64; more is what overflows at another place
_FAR = 1000.0  # times the largest quotient that a bound leaves alone: what is larger is not fine
FEW_ELEMENTS = 8  # below, most of them are no matter of the change


def quotients_moved(scene: Scene, fix: Fix) -> str:
    """Say how many quotients that are fine, of the size of those it leaves alone, a bound under their denominators would change."""
    view, found = scene.birth.forward if scene.birth is not None else None, BOUND.fullmatch(fix.template)
    elsewhere = scene.jump is not None or fix.operand != 1 or fix.limit or fix.site is not None
    if elsewhere or view is None or found is None or not found["low"] or not divides(view):
        return ""
    below, quotients = view.input(1), view.output()
    if below is None or quotients is None or below.is_complex():
        return ""
    under = (below < float(found["low"])).broadcast_to(quotients.shape)
    left = quotients[~under & quotients.isfinite()].abs()
    largest = _FAR * float(left.max()) if left.numel() else math.inf
    fine = (under & (below != 0) & quotients.isfinite() & (quotients.abs() <= largest)).sum()
    return f"it changes {int(fine)} of {quotients.numel()} quotients that are fine: their denominators are below {found['low']}" if fine else ""


def starved_by(now: list[Stopped], usually: list[Stopped]) -> str:
    """Say that a change makes the step finite by stopping the gradient of most elements there, which have one in the healthy steps."""
    dead, among = sum(each.dead for each in now), sum(each.among for each in now)
    as_ever = usually and 2 * sum(each.dead for each in usually) > sum(each.among for each in usually)
    if 2 * dead <= among or among < FEW_ELEMENTS or as_ever or not all(each.only for each in now):
        return ""
    return f"finite, but no gradient passes through {dead} of {among} elements there: it trains next to nothing"


def rewarded_by(scene: Scene, stopped: list[Stopped]) -> str:
    """Say how much lower a loss is by elements that a change holds at the edge of a domain, where it pays to leave that: a log of a scale is minimised."""
    outside, reward = sum(each.outside for each in stopped), sum(each.reward for each in stopped)
    if not outside or scene.birth is None or any(view.name not in _LINEAR for view in scene.birth.path()[1:]):
        return ""
    return f"finite, but it rewards the fault: {counted(outside, 'elements lie outside the domain')}, and the loss is {number(reward)} lower by it"


def wrong_slope(scene: Scene, lab: Lab, put: Put | None) -> str:
    """Say what is wrong with a change in a backward pass of the program's own, if its gradient is not the slope of the loss."""
    op = scene.birth.op if scene.birth is not None else None
    slopes = lab.slopes(put) if put is not None and op is not None and op.backward and op.live else None
    if slopes is None or slopes.agree or lab.is_surrogate():
        return ""
    told, seen = number(slopes.told), number(slopes.seen)
    return f"finite, but not the slope of the loss: along a random direction the gradient says {told}, forward passes beside it give {seen}"


def unlike_wide(lab: Lab, fix: Fix, outcome: Outcome) -> str:
    """Say what is wrong with a wider type at one place, if the loss is not the one that a wide type gives everywhere: another place overflows too."""
    wide = lab.wide.loss if lab.wide is not None and lab.wide.finite else None
    if wide is None or outcome.loss is None or not (".float()" in fix.template or fix.inner == "bfloat16"):
        return ""
    if abs(outcome.loss - wide) <= FAR_FROM_WIDE * abs(wide):
        return ""
    return f"finite, but the loss is {number(outcome.loss)} where the same step in float64 has {number(wide)}: another place is past the range, too"
