"""Bounds that stay: a step that sets weights from its batch (an initialisation by data) keeps the number that was chosen for all later batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from whynan.capsule.tape.facts import is_readable
from whynan.causes.fixes import Fix
from whynan.records import number

if TYPE_CHECKING:
    from whynan.capsule.replay import Program
    from whynan.causes.lab import Lab
    from whynan.causes.swapping import Put

BOUND = re.compile(r"\{x\}\.clamp(?:\(max=(?P<top>[\d.e+-]+)\)|_min\((?P<low>[\d.e+-]+)\))")
_OTHER = 1e3  # times as large: another bound that is as good a guess
_ABSURD = 10  # a weight that is larger is no usual one


def kept_in_weights(lab: Lab, fix: Fix, put: Put, vary: Callable[[Fix], Put]) -> str:
    """Say which weight the step itself sets to a number that only the bound decides, and what it holds; nothing where there is none.

    Cost: two replays.
    """
    found = BOUND.fullmatch(fix.template)
    if found is None or not found["low"]:
        return ""
    before = _weights(lab.program)
    other = replace(fix, template=fix.template.replace(found["low"], repr(float(found["low"]) * _OTHER)))
    with_it, with_other = (_set_by(lab, each, before) for each in (put, vary(other)))
    for name, value in with_it.items():
        beside = with_other.get(name)
        if beside is not None and beside.shape == value.shape and (far := ((value != beside) & (value.abs() > _ABSURD))).any():
            place = far.flatten().nonzero()[0]
            held, also = (float(weight.flatten()[place]) for weight in (value, beside))
            stays = f"`{name}`, which this step sets for good, holds {number(held)} by that bound and {number(also)} by {number(float(found['low']) * _OTHER)}"
            return f"finite now, but {stays}: no replay of this step shows what that does to the batches after it"
    return ""


def _weights(program: Program) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for root in program.roots for name, p in root.named_parameters() if p.is_floating_point() and is_readable(p)}


def _set_by(lab: Lab, put: Put, before: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Play the step with a change; return the weights that it sets, with their new values."""
    made: dict[str, torch.Tensor] = {}
    lab.run(put, after=lambda program: made.update(_weights(program)))
    return {name: value for name, value in made.items() if name in before and not torch.equal(value, before[name])}
