"""Remedies for a value that was made outside of the step: before the first one, in an earlier one, or between two.

It is made again with the change, and the step is played with what that gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from whynan.causes.catalogue import Finding, Scene
from whynan.causes.fixes import Fix
from whynan.causes.lab import Lab
from whynan.causes.source import Expression
from whynan.causes.swapping import Put, Swapper
from whynan.causes.trying import TRIES, Trial, read_again, trial_of
from whynan.errors import let_through
from whynan.records import Remedy
from whynan.trace.locate import Made
from whynan.tripwire.values import damage_of


def beforehand(scene: Scene, there: Scene, made: Made, finding: Finding, expression: Expression | None) -> list[Remedy]:
    """Return the fixes of a finding outside of the steps, until one is proven by the step; `there` is the scene of the calls that made the value."""
    there = replace(there, lab=Lab(made.program, made.targets, []))
    expression = read_again(there, expression)
    tried: list[Remedy] = []
    for fix in finding.fixes:
        remedy = Remedy(fix.title) if not fix.template else _tried(scene, there, made, finding, fix, expression)
        if remedy is not None:
            tried.append(remedy)
        if any(r.result == "proven" for r in tried) or len(tried) > TRIES:
            break
    order = {"proven": 0, "not tried": 1, "failed": 2}
    return sorted(tried, key=lambda r: (order[r.result], not r.diff))


def _tried(scene: Scene, there: Scene, made: Made, finding: Finding, fix: Fix, expression: Expression | None) -> Remedy | None:
    """Try one; None where it does not fit the source."""
    trial = None if fix.limit else trial_of(there, fix, expression, finding.site or made.birth.site)
    if trial is None or not trial.diff:
        return None
    good, words = _judged(scene, made, finding, trial)
    return Remedy(fix.title, trial.diff, fix.safe, {True: "proven", False: "failed", None: "not tried"}[good], words)


def _judged(scene: Scene, made: Made, finding: Finding, trial: Trial) -> tuple[bool | None, str]:
    lab = scene.lab
    assert lab is not None
    values = _made_again(made, trial.put) if trial.put is not None and made.tensors and not lab.cut else []
    pairs = list(zip(made.tensors, values, strict=bool(values)))
    if not pairs or any(value.shape != held.shape or value.dtype is not held.dtype for held, value in pairs):
        return None, ""
    mended = [(held, value) for held, value in pairs if not damage_of(value)]
    if not mended:
        return False, f"what is made there is still {damage_of(values[0]).kind}"
    try:
        outcome = lab.run(around=_in_place_of(mended))
    except Exception as error:  # a tensor that cannot be written to: an expanded one
        let_through(error)
        return None, ""
    good, words = lab.judge(outcome, finding.empty)
    if good:
        good, more = lab.weigh(outcome, lambda program: lab.run(around=_in_place_of(mended), program=program))
        words = f"{words}; {more}" if good and more else more or words
    return good, words


def _made_again(made: Made, put: Put) -> list[torch.Tensor]:
    """Return what the calls make with something else in the place of one; nothing where it did not come to be used."""
    program, swapper = made.program, Swapper(made.program, [put])
    try:
        with program.still():
            with swapper:
                run = program.play()
            found = [t.detach().clone() for t in made.targets(run)] if run.error is None else []
    except Exception as error:
        let_through(error)
        return []
    return found if swapper.places and len(found) == len(made.tensors) else []


@contextmanager
def _in_place_of(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Have other values in tensors of the program's; what a live graph has saved of them is still what it was."""
    before = [(held, held.detach().clone()) for held, _ in pairs]
    with torch.autograd._unsafe_preserve_version_counter(tuple(held for held, _ in pairs)):  # type: ignore[attr-defined]
        try:
            _write(pairs)
            yield
        finally:
            _write(before)


def _write(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad(), torch._C.DisableTorchFunction():
        for held, value in pairs:
            held.copy_(value)
