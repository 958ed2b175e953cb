"""After a step that was dropped, everything is bit for bit as in a run that never drew that batch.

The full product optimizer x precision x fault place x policy is run, one program each: what else there is to a program
(scheduler, averages, accumulation, clipping, ways to step and to zero, parts of the model, when the loss is read) is
drawn by the number of the combination, so that a failure has a name and CI does the same every time. A second test lets
hypothesis draw everything, to find and shrink what the product missed.

A diagnosis could do harm itself. A rollback would hide that; each other policy shows it, whatever else it does. So each optimizer,
precision and place has a whole diagnosis, with all remedies tried, with one of those policies, another one in each precision; and so
has every program that hypothesis draws. In the other programs the failing step is only replayed.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from choices import CODES, IN_STATE, ONLY_CUDA, OPTIMIZERS, PLACES, POLICIES, PRECISIONS, REST, Case, drawn
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from unharmed import Expecting, Outcome, all_events, differences, only_replayed, unwatched, watched

import whynan
from whynan.engine.noticing import Noticing
from whynan.engine.probes import Probes

COMBINATIONS = list(itertools.product(OPTIMIZERS, PRECISIONS, PLACES, POLICIES))
NUMBERS = {combination: number for number, combination in enumerate(COMBINATIONS)}
REVEALING = [policy for policy in POLICIES if not policy.startswith("rollback")]
ON_CPU = [name for name in OPTIMIZERS if name not in ONLY_CUDA]


def case_of(optimizer: str, precision: str, place: str, policy: str, **more: Any) -> Case:
    """The program of one combination."""
    number = NUMBERS[optimizer, precision, place, policy]
    return drawn(number, optimizer=optimizer, precision=precision, place=place, policy=policy, **more)


def is_whole(optimizer: str, precision: str, place: str, policy: str) -> bool:
    """Whether a combination has whole diagnoses: with one policy each, another one for the next optimizer, precision or place."""
    turn = list(OPTIMIZERS).index(optimizer) + PRECISIONS.index(precision) + PLACES.index(place)
    return REVEALING[turn % len(REVEALING)] == policy


def check(case: Case) -> None:
    """Run a case watched, and the program it must equal unwatched; compare everything."""
    outcome = watched(case)
    assert "internal error" not in outcome.said, outcome.said
    assert outcome.incidents, f"nothing was noticed in {case}"
    assert outcome.incidents[0].cause.code in CODES[case.place], (outcome.incidents[0].cause, case)
    assert f"[{outcome.incidents[0].cause.code}]" in outcome.said
    if case.policy == "observe":
        check_observed(case, outcome)
    else:
        check_acted(case, outcome)


def check_observed(case: Case, outcome: Outcome) -> None:
    """Observe changes nothing: the run is the unwatched one, damage and all."""
    assert {i.action.taken for i in outcome.incidents} == {"observed"}
    assert differences(outcome.state, unwatched(case, all_events(), faulty=True).state) == [], case


def check_acted(case: Case, outcome: Outcome) -> None:
    """The state is that of the run the policy promises, and each fault is one incident."""
    script = Expecting(case, noticed_at(case, outcome)).follow()
    assert {i.cause.code for i in outcome.incidents} <= set(CODES[case.place]), case
    assert [i.action.taken for i in outcome.incidents] == script.taken, case
    assert {i.rank for i in outcome.incidents} == {0}
    assert bool(outcome.stopped) == ("stopped" in script.taken)
    if outcome.stopped and case.place in IN_STATE:
        return  # the state is beyond repair, and said to be
    expected = unwatched(case, script.events)
    assert differences(outcome.state, expected.state) == [], case
    whole = {number for kind, number, left_out in script.events if kind == "step" and left_out < 0}
    assert differences(*({n: v for n, v in o.losses.items() if n in whole} for o in (outcome, expected))) == [], case


def noticed_at(case: Case, outcome: Outcome) -> int:
    """The step at which bad state is noticed: a bad moment is seen once the update has written it into the weights."""
    if case.place != "one moment":
        return case.at
    step = outcome.incidents[0].step // (2 if case.optimizer == "Muon" else 1)
    assert step in (case.at, case.at + 1)
    return int(step)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_combination(optimizer: str, place: str, policy: str) -> None:
    """Whatever is trained with whatever, and wherever the fault is: the promise of the policy holds in every precision."""
    cases = [case_of(optimizer, precision, place, policy) for precision in PRECISIONS]
    possible = [case for case in cases if not case.impossible()]
    if not possible:
        pytest.skip(cases[-1].impossible())
    for case in possible:
        with contextlib.nullcontext() if is_whole(optimizer, case.precision, place, policy) else only_replayed(place):
            check(case)


def test_there_are_enough_combinations() -> None:
    """At least two thousand programs are run, and each optimizer, precision, place and policy is among them."""
    possible = [c for c in COMBINATIONS if not case_of(*c).impossible()]
    assert len(possible) >= 2000
    for index, names in enumerate((ON_CPU, PRECISIONS, PLACES, POLICIES)):
        assert {c[index] for c in possible} == set(names)


def test_enough_diagnoses_are_whole() -> None:
    """There is a whole one for each optimizer, precision and place, and in each precision of an optimizer and place with another policy."""
    possible = [c for c in COMBINATIONS if not case_of(*c).impossible()]
    whole = [c for c in possible if is_whole(*c)]
    assert {c[:3] for c in whole} == {c[:3] for c in possible}
    assert len({(optimizer, place, policy) for optimizer, _, place, policy in whole}) == len(whole)
    assert {c[2:] for c in whole} == set(itertools.product(PLACES, REVEALING))


def test_every_choice_is_drawn() -> None:
    """What is drawn by number covers every choice of everything else, together with every policy."""
    possible = [case_of(*c) for c in COMBINATIONS if not case_of(*c).impossible()]
    for name, values in REST.items():
        missing = {(v, p) for v in values for p in POLICIES} - {(getattr(c, name), c.policy) for c in possible}
        allowed = {"rhythm": "rollback", "wall_steps": "skip:1,rollback rollback:2 observe stop"}.get(name, "")
        assert all(allowed and (policy in allowed or allowed in policy) for _, policy in missing), (name, missing)


everything = st.fixed_dictionaries(
    {
        "optimizer": st.sampled_from(ON_CPU),
        "precision": st.sampled_from(PRECISIONS),
        "place": st.sampled_from(PLACES),
        "policy": st.sampled_from(POLICIES),
        **{name: st.sampled_from(tuple(dict.fromkeys(values))) for name, values in REST.items()},
    }
).map(lambda chosen: Case(**chosen).made_possible())


@pytest.mark.parametrize("part", range(4))
def test_any_program(part: int) -> None:
    """The same for 200 programs drawn at random; in parts, so that several processes share them."""

    @seed(part)
    @settings(max_examples=50, database=None, suppress_health_check=list(HealthCheck))
    @given(everything.filter(lambda case: not case.impossible()))
    def each(case: Case) -> None:
        check(case)

    each()


# -- gradient scalers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["SGD momentum", "AdamW fused", "Muon"])
@pytest.mark.parametrize("policy", POLICIES)
def test_overflow_of_a_scale_is_the_scalers_own_business(optimizer: str, policy: str) -> None:
    """A scale that is too large for a while is no incident, and the run is the unwatched one: scheduler and averages too."""
    case = Case(optimizer, "fp16 scaler", "scaler", policy, scheduler="StepLR", average="ema", scale=2.0**60)
    outcome = watched(case)
    assert outcome.incidents == []
    assert differences(outcome.state, unwatched(case, all_events(), faulty=True).state) == []
    assert outcome.state["optimizers"][0]["state"], "some steps were made before the scale was too large"


def test_run_in_which_no_step_is_ever_taken() -> None:
    """A scaler that skips every step of a run is told at the end, even where its scale is not small yet."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    with whynan.watch(optimizer, files=False) as guard:
        for _ in range(6):
            optimizer.zero_grad()
            scaler.scale((weight * 1e6).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert guard.incidents == []
    assert [(i.cause.code, i.action.taken) for i in guard.incidents] == [("WN606", "observed")]
    assert scaler.get_scale() == 2.0**114


@pytest.mark.parametrize("place", ["one parameter", "one buffer", "one moment"])
@pytest.mark.parametrize("optimizer", ["AdamW fused", "SGD fused"])
def test_bad_state_under_a_scaler_that_the_host_does_not_wait_for(optimizer: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: the loss is not read before the update, and bad state shows in gradients and buffers only."""
    look = Noticing.check_loss
    monkeypatch.setattr(Noticing, "check_loss", lambda self, entry, wait=False: look(self, entry) if wait else None)
    monkeypatch.setattr(Probes, "probed", lambda self, tensor, result: None)
    for policy in POLICIES:
        check(case_of(optimizer, "fp16 scaler", place, policy))


# -- on the GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_combination_on_the_gpu(optimizer: str, precision: str) -> None:
    """The same on a GPU, capturable optimizers and skips made on the device included."""
    for place, policy in itertools.product(PLACES, POLICIES):
        case = case_of(optimizer, precision, place, policy, device="cuda")
        if not case.impossible():
            check(case)
