"""Remedies for a value that was made before the first step, or between two: it is made again with the change, and the step is played with what that gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from whynan.causes.catalogue import Finding, Scene
from whynan.causes.fixes import Fix
from whynan.causes.lab import Lab, Put, Swapper
from whynan.causes.source import Expression
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
    value = _made_again(made, trial.put) if trial.put is not None else None
    if value is None or value.shape != made.tensor.shape or value.dtype is not made.tensor.dtype or lab.cut:
        return None, ""
    if damage := damage_of(value):
        return False, f"what is made there is still {damage.kind}"
    try:
        outcome = lab.run(around=_in_place_of(made.tensor, value))
    except Exception as error:  # a tensor that cannot be written to: an expanded one
        let_through(error)
        return None, ""
    good, words = lab.judge(outcome, finding.empty)
    if good:
        good, more = lab.weigh(outcome, lambda program: lab.run(around=_in_place_of(made.tensor, value), program=program))
        words = f"{words}; {more}" if good and more else more or words
    return good, words


def _made_again(made: Made, put: Put) -> torch.Tensor | None:
    """Return what the calls make with something else in the place of one; None where it did not come to be used."""
    program, swapper = made.program, Swapper(made.program, [put])
    try:
        with program.still():
            with swapper:
                run = program.play()
            found = [t.detach().clone() for t in made.targets(run)] if run.error is None else []
    except Exception as error:
        let_through(error)
        return None
    return found[0] if found and swapper.places else None


@contextmanager
def _in_place_of(tensor: torch.Tensor, value: torch.Tensor) -> Iterator[None]:
    """Have another value in a tensor of the program's; what a live graph has saved of it is still what it was."""
    before = tensor.detach().clone()
    with torch.autograd._unsafe_preserve_version_counter(tensor):  # type: ignore[attr-defined]
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                tensor.copy_(value)
            yield
        finally:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                tensor.copy_(before)
