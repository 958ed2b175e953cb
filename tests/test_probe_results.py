"""The report: what is born at one line is told once, and the text keeps to 80 columns."""

from __future__ import annotations

import json
from dataclasses import replace

from probe_models import HAZARDS, mlp

import whynan
from whynan.probing.results import Finding, Group, Level, Probed, Verdict, merged
from whynan.records import Cause, Confidence, Incident, Origin, Phase, Span, Symptom


def _incident(code: str, line: int, module: str = "") -> Incident:
    span = Span("train.py", line, line, 0, 5, "f", "x / y") if line else Span("", 0)
    cause = Cause(code, "slug", "title", Confidence.SUSPECTED)
    return Incident(0, 0, "now", Symptom("loss", "nan", "loss"), Origin(Phase.LOSS, span, module=module), cause)


def _finding(attack: str, level: Level = Level.FINDING, code: str = "WN103", line: int = 7, **more: str) -> Finding:
    return Finding(level, Group.EDGES, attack, "the loss is not finite", _incident(code, line, more.pop("module", "")), **more)


def test_the_same_line_is_one_finding_that_names_the_other_attacks() -> None:
    (found,) = merged([_finding("zeros"), _finding("constants"), _finding("zeros")])
    assert (found.attack, found.also) == ("zeros", ("constants",))


def test_a_finding_takes_precedence_over_a_note_at_the_same_line() -> None:
    (found,) = merged([_finding("huge", Level.NOTE), _finding("zeros")])
    assert (found.level, found.attack) == (Level.FINDING, "zeros")


def test_a_specific_code_takes_precedence_and_inherits_change_and_capsule() -> None:
    searched = _finding("Div", code="WN503", change="3 values", capsule="kept")
    (found,) = merged([searched, _finding("zeros", code="WN103")])
    assert (found.code, found.change, found.capsule) == ("WN103", "3 values", "kept")


def test_different_lines_and_different_modules_stay_apart() -> None:
    assert len(merged([_finding("a", line=7), _finding("b", line=8)])) == 2
    assert len(merged([_finding("a", line=0, module="x"), _finding("b", line=0, module="y")])) == 2
    assert len(merged([_finding("a", line=0, module="x"), _finding("b", line=0, module="x")])) == 1


def test_findings_without_incident_are_not_joined() -> None:
    plain = Finding(Level.FINDING, Group.GRADIENT, "w", "too large")
    assert len(merged([plain, replace(plain, attack="v")])) == 2


def test_where_names_the_line_the_module_or_torch() -> None:
    assert _finding("a").where == "at train.py:7"
    assert _finding("a", line=0, module="head").where == "in module 'head'"
    assert _finding("a", line=0).where == "in code of torch"


def test_a_long_verdict_is_cut_at_80_columns_and_many_notes_are_counted() -> None:
    notes = tuple(Finding(Level.NOTE, Group.EDGES, f"attack {i}", "text") for i in range(20))
    text = repr(Probed("Net", (Verdict(Group.SEARCH, "ok", "words " * 40),), notes=notes))
    assert max(map(len, text.splitlines())) == 80
    assert "and 8 more" in text
    assert text.splitlines()[-1].startswith("nothing found, 20 notes")


def test_refusals_are_in_the_json_but_not_among_the_notes_of_the_text() -> None:
    refused = Finding(Level.REFUSED, Group.EDGES, "batch of one", "ValueError: two rows")
    made = Probed("Net", (), notes=(refused,))
    assert "two rows" not in repr(made)
    assert "two rows" in json.dumps(made.to_json(), allow_nan=False)


def test_the_report_of_a_healthy_model_stays_within_80_columns() -> None:
    text = repr(whynan.probe(*mlp(), budget=0))
    assert max(map(len, text.splitlines())) <= 80


def test_the_json_of_a_finding_has_code_line_and_what_else_leads_there() -> None:
    told = whynan.probe(*HAZARDS["percentage"](), budget=0).to_json()
    found = told["findings"][0]  # type: ignore[index, call-overload]
    assert {"level", "group", "attack", "text", "code", "file", "line", "incident", "also", "change", "capsule"} <= set(found)  # type: ignore[arg-type]
