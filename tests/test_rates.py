"""WN607: a loaded learning rate that replaces the configured one is reported with both numbers; a normal resume is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

import whynan
from whynan.causes.rates import Rates, overridden

RATE = st.floats(1e-8, 10)


def optimizer(rate: Any, kind: type[Any] = torch.optim.AdamW) -> torch.optim.Optimizer:
    """An optimizer of one weight."""
    return kind([torch.nn.Parameter(torch.ones(2))], lr=rate)  # type: ignore[no-any-return]


def steps(made: torch.optim.Optimizer, count: int = 1) -> None:
    """Train a little."""
    for _ in range(count):
        weight = made.param_groups[0]["params"][0]
        made.zero_grad()
        weight.square().sum().backward()
        made.step()


def saved(rate: Any, kind: type[Any] = torch.optim.AdamW) -> dict[str, Any]:
    """The state of an optimizer that has trained."""
    made = optimizer(rate, kind)
    steps(made)
    return copy.deepcopy(made.state_dict())


def codes(guard: Any) -> list[str]:
    """The codes of the incidents so far."""
    return [i.cause.code for i in guard.incidents]


@given(RATE, RATE)
def test_known_base_rates_are_compared_both_ways(a: float, b: float) -> None:
    """With base rates on record any difference counts, up or down; equal ones never do."""
    assert bool(overridden(Rates((a,)), Rates((b,)))) == (abs(a - b) > 1e-6 * max(a, b))
    assert overridden(Rates((a, b)), Rates((a, b))) == ()


@given(RATE, RATE)
def test_unknown_base_rates_count_only_upwards(a: float, b: float) -> None:
    """A lower rate without a base rate beside it may be a decayed one, a higher one may not."""
    assert bool(overridden(Rates((a,), False), Rates((b,), False))) == (b - a > 1e-6 * b)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_override_is_reported_once_with_both_numbers(kind: type[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The incident has both numbers, the line of the load, phase optimizer; the training is not touched or counted against."""
    state = saved(1e-3, kind)
    with whynan.watch(files=False) as guard:
        made = optimizer(1e-4, kind)
        made.load_state_dict(state)
        steps(made, 3)
    [incident] = guard.incidents
    assert (incident.cause.code, incident.origin.phase, incident.action.taken, incident.action.total) == ("WN607", "optimizer", "observed", 0)
    assert incident.origin.span.code == "made.load_state_dict(state)"
    assert "0.0001" in incident.cause.evidence[0] and "0.001" in incident.cause.evidence[0]
    assert made.param_groups[0]["lr"] == 1e-3
    assert "error[WN607]" in capsys.readouterr().err


def test_override_without_a_step_is_told_at_the_end() -> None:
    """A program that loads and ends is told too."""
    with whynan.watch(files=False) as guard:
        made = optimizer(1e-4)
        made.load_state_dict(saved(1e-3))
    assert codes(guard) == ["WN607"]


def _set(made: torch.optim.Optimizer) -> None:
    made.param_groups[0]["lr"] = 1e-4


def _set_to_equal(made: torch.optim.Optimizer) -> None:
    made.param_groups[0]["lr"] = float("0.001")


@pytest.mark.parametrize("mend", [_set, _set_to_equal])
def test_rate_set_after_loading_is_the_scripts_own(mend: Callable[[torch.optim.Optimizer], None]) -> None:
    """A script that sets the rate after loading, to whatever number, has decided it: nothing to report."""
    with whynan.watch(files=False) as guard:
        made = optimizer(1e-4)
        made.load_state_dict(saved(1e-3))
        mend(made)
        steps(made)
    assert codes(guard) == []


def test_tensor_rates() -> None:
    """A rate held in a tensor is compared by value, and seen when written in place."""
    state = saved(torch.tensor(1e-3))
    for write, wanted in ((False, ["WN607"]), (True, [])):
        with whynan.watch(files=False) as guard:
            made = optimizer(torch.tensor(1e-4))
            made.load_state_dict(state)
            if write:
                made.param_groups[0]["lr"].fill_(1e-4)
            steps(made)
        assert codes(guard) == wanted
    with whynan.watch(files=False) as guard:
        made = optimizer(1e-3)
        made.load_state_dict(state)
        steps(made)
    assert codes(guard) == []


def test_second_load_is_compared_with_the_script() -> None:
    """Loading twice does not make the first load's rate the configured one."""
    with whynan.watch(files=False) as guard:
        made = optimizer(1e-4)
        made.load_state_dict(saved(1e-3))
        made.load_state_dict(saved(1e-3))
        steps(made)
    assert codes(guard) == ["WN607"]


def test_scheduler_made_after_the_load_works_from_the_loaded_base() -> None:
    """A scheduler made later writes the rate, but from the base rate that was loaded: still an override."""
    first = optimizer(1e-3)
    lr_scheduler.ExponentialLR(first, 0.5)
    steps(first)
    with whynan.watch(files=False) as guard:
        made = optimizer(1e-4)
        made.load_state_dict(copy.deepcopy(first.state_dict()))
        scheduler = lr_scheduler.LambdaLR(made, lambda step: 0.5)
        steps(made)
        scheduler.step()
    assert codes(guard) == ["WN607"]


def test_scheduler_and_optimizer_loaded_together_are_one_incident() -> None:
    """Optimizer and scheduler of one checkpoint override together: told once."""
    first = optimizer(1e-3)
    old = lr_scheduler.CosineAnnealingLR(first, 10)
    steps(first)
    with whynan.watch(files=False) as guard:
        made = optimizer(1e-4)
        scheduler = lr_scheduler.CosineAnnealingLR(made, 10)
        made.load_state_dict(copy.deepcopy(first.state_dict()))
        scheduler.load_state_dict(copy.deepcopy(old.state_dict()))
        steps(made)
    assert codes(guard) == ["WN607"]


def test_going_back_within_a_run_is_not_a_resume() -> None:
    """An optimizer that has trained and loads its own earlier state is left alone, whatever its rate is by then."""
    with whynan.watch(files=False) as guard:
        made = optimizer(1e-3)
        steps(made)
        earlier = copy.deepcopy(made.state_dict())
        made.param_groups[0]["lr"] = 1e-5
        steps(made)
        made.load_state_dict(earlier)
        steps(made)
    assert codes(guard) == []


def test_groups_are_told_apart() -> None:
    """Each group that was overridden is named with its numbers."""

    def two(a: float, b: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": a}, {"params": [torch.nn.Parameter(torch.ones(1))], "lr": b}])

    with whynan.watch(files=False) as guard:
        made = two(1e-3, 1e-3)
        made.load_state_dict(two(1e-3, 0.5).state_dict())
    assert guard.incidents[0].symptom.name == "group 1"


def test_refused_load_reports_nothing() -> None:
    """A load that torch refuses raises as it does, and overrides nothing."""
    with whynan.watch(files=False) as guard:
        made = optimizer(1e-4)
        with pytest.raises(ValueError, match="different number of parameter groups"):
            made.load_state_dict({"state": {}, "param_groups": []})
    assert codes(guard) == []
