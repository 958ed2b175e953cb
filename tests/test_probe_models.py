"""Probing models of many kinds: a healthy one is silent, a planted hazard is found with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from probe_models import HAZARDS, HEALTHY, marked_line

import whynan


@pytest.mark.parametrize("factory", HEALTHY, ids=lambda f: f.__name__)
def test_a_healthy_model_has_no_finding(factory: Callable[[], Any]) -> None:
    report = whynan.probe(*factory(), budget=2)
    assert report.findings == (), repr(report)
    assert report.ok
    assert report.status == 0


@pytest.mark.parametrize("name", HAZARDS)
def test_a_planted_hazard_is_found_at_its_line(name: str) -> None:
    report = whynan.probe(*HAZARDS[name](), budget=2)
    lines = {f.origin[1] for f in report.findings}
    assert marked_line(name) in lines, repr(report)
    assert report.status == 1


@pytest.mark.parametrize(("name", "code"), [("masked_attention", "WN401"), ("empty_selection", "WN402"), ("isolated_node", "WN106"), ("singular", "WN108")])
def test_a_finding_carries_the_diagnosis_of_the_core(name: str, code: str) -> None:
    report = whynan.probe(*HAZARDS[name](), budget=0)
    found = next(f for f in report.findings if f.origin[1] == marked_line(name))
    assert found.code == code
    assert found.incident is not None
    assert f"error[{code}]" in repr(report)
    assert found.incident.remedies


def test_attacks_that_end_at_one_line_are_one_finding() -> None:
    report = whynan.probe(*HAZARDS["unexplained_variance"](), budget=0)
    assert len(report.findings) == 1
    assert len(report.findings[0].also) >= 3


def test_without_a_budget_the_groups_still_find_it() -> None:
    report = whynan.probe(*HAZARDS["distance"](), budget=0)
    assert marked_line("distance") in {f.origin[1] for f in report.findings}
    assert next(v for v in report.verdicts if v.group == "search").state == "not run"


def test_a_safe_form_proven_at_extreme_outputs_is_a_finding_not_a_note() -> None:
    report = whynan.probe(*HAZARDS["log_of_softmax"](), budget=0)
    found = report.findings[0]
    assert found.group == "loss"
    assert "log_softmax" in repr(report)
