"""`whynan.probe`: attack a model and a loss before the first step."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from whynan.errors import one_line
from whynan.probing import examining, groups, precision, ranges, rates
from whynan.probing.attacking import Attacks, has_safe_form
from whynan.probing.results import Finding, Group, Level, Probed, Verdict, merged
from whynan.probing.searching import Broken, Search
from whynan.probing.steps import SubjectStep, Values, other_weights, step_of, values_of
from whynan.probing.subject import Subject, subject_of
from whynan.probing.training import training_of
from whynan.records import count, number


def probe(
    model: torch.nn.Module | None,
    loss_fn: Callable[..., Any] | None,
    batch: Any,
    *,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    vocabulary: int | None = None,
    padding: int | None = None,
    ignore_index: int | None = None,
    optimizer: Any = None,
    lr: float | None = None,
    clip: float | None = None,
    budget: float = 30.0,
    run_dir: str | Path | None = None,
) -> Probed:
    """Attack one training step: edge cases, precisions, a search for inputs that break it, and ranges.

    >>> import torch, whynan
    >>> def loss_fn(model, batch):
    ...     return model(batch).pow(2).mean()
    >>> whynan.probe(torch.nn.Linear(3, 2), loss_fn, torch.randn(4, 3), budget=2).ok
    True

    `loss_fn(model_output, batch)`, `loss_fn(model, batch)` and `loss_fn(model_output, target)` are all understood; `model` may be None
    for a loss alone. `bounds` gives the range of an input by its name or number in the batch; where none is given the
    observed range, widened a little, counts. An attack outside the ranges is a note, not a finding. With `run_dir` the
    failing step that the search found is kept as a capsule. Weights, buffers, gradients and random state are left as
    they are.

    With an `optimizer` (or a function of the parameters that makes one, or its name and `lr`), or with `lr` alone (AdamW is assumed), some
    updates on copies judge the learning rate; `clip` is the norm that gradients are clipped to.

    Cost: some hundred steps on the sample batch, then at most `budget` seconds of search; 0 leaves the search out.
    """
    made = {"model": model, "loss_fn": loss_fn, "batch": batch, "bounds": bounds, "vocabulary": vocabulary, "padding": padding, "ignore_index": ignore_index}
    made |= {"optimizer": optimizer, "lr": lr, "clip": clip}
    return probe_subject(subject_of(made, "probe()"), budget, Path(run_dir) if run_dir is not None else None, keep=run_dir is not None)


def probe_subject(
    subject: Subject, budget: float = 30.0, run_dir: Path | None = None, keep: bool = False, say: Callable[[str], None] = lambda text: None
) -> Probed:
    """Do the same for a subject; `keep` writes capsules, without `run_dir` below `whynan-runs`; `say` is told what is being done."""
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attacks on edge cases torch warns often
        step = step_of(subject)
        attacks = Attacks(step)
        training = training_of(step)
        looks: dict[Group, Callable[[Attacks], Verdict]] = {
            Group.FORWARD: groups.forward,
            Group.LOSS: groups.loss,
            Group.GRADIENT: groups.gradient_flow,
            **({Group.RATE: lambda attacks: rates.verdict_of(attacks, training)} if training is not None else {}),
            Group.STABILITY: precision.stability,
            Group.EDGES: groups.edges,
            Group.SEARCH: lambda attacks: _searched(attacks, budget, run_dir, keep, say),
            Group.RANGES: ranges.verdict_of,
        }
        verdicts = [_told(group, look, attacks, say) for group, look in looks.items()]
    everything = merged(attacks.found)
    findings = tuple(f for f in everything if f.level is Level.FINDING)
    rest = tuple(f for f in everything if f.level is not Level.FINDING)
    return Probed(_title(step), tuple(verdicts), findings, rest, tuple(_inputs(step)), time.monotonic() - begin, {"attempts": sum(attacks.tried.values())})


def _title(step: SubjectStep) -> str:
    total = sum(w.numel() for _, w in step.weights)
    return f"{step.subject.title}, {count(total)} weights" if step.weights else step.subject.title


def _inputs(step: SubjectStep) -> list[str]:
    words = []
    for given in step.inputs:
        span = f" {number(given.low)} to {number(given.high)}" if given.value.dtype is not torch.bool and given.role != "other" else ""
        shape = " (nested)" if given.value.is_nested else str(list(given.value.shape))
        words.append(f"{given.name} {given.role}{shape}{span}{' (stated)' if given.stated else ''}")
    return words


MOST = 6  # failures the search reports


def _searched(attacks: Attacks, budget: float, home: Path | None, keep: bool, say: Callable[[str], None]) -> Verdict:
    """Search until the budget is spent, each time for a failure that begins elsewhere; outside the ranges one is enough."""
    if budget <= 0:
        return Verdict(Group.SEARCH, "not run", "no budget")
    marks: set[tuple[str, str, int]] = set()

    def known(values: Values, weights: Values | None) -> bool:
        with other_weights(attacks.step, weights):
            return bool(marks) and examining.fingerprint(attacks.step, values) in marks

    search = Search(attacks.step, budget, say, known=known)
    if not search.healthy():
        return Verdict(Group.SEARCH, "not run", "the sample step itself is not finite")
    found: Broken | None = None
    while search.left > 0 and len(marks) < MOST and (found is None or found.inside):
        found = search.run()
        if found is None:
            break
        place = home / f"failure-{len(marks) + 1}" if home is not None and marks else home  # one capsule in each directory
        change = describe(attacks.step, found)
        with other_weights(attacks.step, found.weights):
            marks.add(examining.fingerprint(attacks.step, found.values))
            incident, capsule = examining.diagnose(attacks.step, found.values, place, keep)
        level = Level.FINDING if found.inside or has_safe_form(incident) else Level.NOTE
        what = f"the {found.outcome.place or 'step'} is not finite"
        attacks.found.append(Finding(level, Group.SEARCH, found.how, what, incident, change, str(capsule) if capsule else ""))
    if not marks:
        return Verdict(Group.SEARCH, "ok", f"{search.attempts} steps in {budget - max(search.left, 0):.1f} s broke nothing")
    return groups.verdict(attacks, Group.SEARCH, f"{search.attempts} steps in {budget - max(search.left, 0):.1f} s")


def describe(step: SubjectStep, found: Broken) -> str:
    """Say in one sentence what was changed, and by how much."""
    words = []
    if found.weights is not None:
        shares = [
            float((new - old.detach()).abs().max() / old.detach().abs().max().clamp_min(1e-30))
            for new, (_, old) in zip(found.weights, step.weights, strict=True)
        ]
        return f"weights moved by at most {number(max(shares))} of the largest of their tensor"
    for value, given in zip(found.values, values_of(step), strict=True):
        name = next(i.name for i in step.inputs if i.value is given)
        if value.shape != given.shape:
            words.append(f"{name} cut to {list(value.shape)}")
            continue
        moved = value.detach() != given.detach()
        if bool(moved.any()):
            most = float((value.detach().double() - given.detach().double()).abs().nan_to_num().max())
            words.append(f"{int(moved.sum())} of {moved.numel()} values of {name} changed, by at most {number(most)}")
    beyond = "" if found.inside else f"; outside the ranges ({found.factor:g} times)" if found.factor > 1 else "; outside the ranges"
    return "; ".join(words) + beyond


def _told(group: Group, look: Callable[[Attacks], Verdict], attacks: Attacks, say: Callable[[str], None]) -> Verdict:
    """Run one group; a failure of our own costs this group, not the others."""
    say(f"probe: {group}")
    try:
        return look(attacks)
    except Exception as error:
        attacks.note(group, "not finished", one_line(error))
        return Verdict(group, "not run", "it failed; the note says why")
