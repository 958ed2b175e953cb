"""Records and what is made of them on disk: valid JSON with every field of the contract, never a bare NaN."""

from __future__ import annotations

import doctest
import importlib
import json
import math
import re
from typing import Any

import pytest
from conftest import Sandbox
from hypothesis import given
from hypothesis import strategies as st

from whynan.records import (
    NOWHERE,
    Action,
    Cause,
    Confidence,
    Incident,
    Origin,
    Phase,
    Remedy,
    Span,
    Symptom,
    TensorStats,
    count,
    dumps,
    jsonable,
    number,
    short_dtype,
)


@pytest.mark.parametrize("name", ["records", "recovery.policy", "watching", "explaining", "capsule.state.stasis"])
def test_examples_in_docstrings(name: str) -> None:
    """The examples in the docstrings run and give what they say."""
    module = importlib.import_module(f"whynan.{name}")
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


JSON_TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4) | st.tuples(inner, inner),
    max_leaves=20,
)


def refuse(name: str) -> Any:
    """A strict reader's answer to NaN and Infinity."""
    raise ValueError(name)


@given(JSON_TREES)
def test_every_value_becomes_strict_json(value: object) -> None:
    """Whatever goes in, a strict reader reads it back, finite numbers exactly as they were; one value is one line."""
    line = dumps(value)
    assert "\n" not in line
    assert json.loads(line, parse_constant=refuse) == jsonable(value)


@given(st.floats())
def test_numbers_that_are_not_finite_become_words(value: float) -> None:
    """NaN and infinities are the strings nan, inf and -inf; every other number stays the same number."""
    expected: float | str = value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    assert jsonable(value) == expected


@given(st.floats(-1e308, 1e308) | st.sampled_from([math.nan, math.inf, -math.inf]))
def test_printed_numbers_read_back_close(value: float) -> None:
    """A printed number is the number to four digits, and never a Python float's long tail."""
    text = number(value)
    assert len(text) <= 11
    back = float(text)
    assert (math.isnan(back) and math.isnan(value)) or math.isclose(back, value, rel_tol=1e-3, abs_tol=5e-324)


@pytest.mark.parametrize(
    ("stats", "line"),
    [
        (TensorStats("x", "float32", (8,), min=0.0, max=2.5, zeros=1), "f32[8]  min 0  max 2.5  zeros 1"),
        (TensorStats("x", "bfloat16", (), min=0.35, max=0.35), "bf16  0.35"),
        (TensorStats("x", "float16", (), nan=1), "f16  nan!"),
        (TensorStats("x", "float64", (2, 2), posinf=1, neginf=3), "f64[2, 2]  inf 1!  -inf 3!"),
        (TensorStats("x", "int64", (3,), min=-1.0, max=7.0), "i64[3]  min -1  max 7"),
        (TensorStats("x", "float32", (0,)), "f32[0]"),
    ],
)
def test_a_tensor_in_one_line(stats: TensorStats, line: str) -> None:
    """Finite statistics first, damage last with a mark."""
    assert stats.line() == line
    assert stats.nonfinite == stats.nan + stats.posinf + stats.neginf


@given(st.integers(min_value=0, max_value=10**15))
def test_counts_are_grouped(value: int) -> None:
    """Counts are printed in groups of three."""
    text = count(value)
    assert int(text.replace(" ", "")) == value
    assert re.fullmatch(r"\d{1,3}( \d{3})*", text)


@pytest.mark.parametrize(
    ("long", "short"), [("float32", "f32"), ("torch.int64", "i64"), ("uint8", "u8"), ("complex64", "c64"), ("bool", "bool"), ("float8_e4m3fn", "float8_e4m3fn")]
)
def test_short_dtypes(long: str, short: str) -> None:
    """Dtypes are shortened as in the diagnosis."""
    assert short_dtype(long) == short


# -- the contract -------------------------------------------------------------------------------------------------

STATS = {
    "name": str,
    "dtype": str,
    "shape": list,
    "nan": int,
    "posinf": int,
    "neginf": int,
    "zeros": int,
    "min": (int, float, str, type(None)),
    "max": (int, float, str, type(None)),
}
SPAN = {"file": str, "line": int, "end_line": int, "column": int, "end_column": int, "function": str, "code": str}
CONTRACT: dict[str, Any] = {
    "schema": int,
    "step": int,
    "rank": int,
    "time": str,
    "symptom": {"place": str, "kind": str, "name": str},
    "origin": {
        **SPAN,
        "phase": str,
        "module": str,
        "op": str,
        "exact": bool,
        "note": str,
        "inputs": [STATS],
        "output": STATS,
        "samples": [int],
        "from": [{"file": str, "line": int, "label": str}],
    },
    "cause": {"code": str, "slug": str, "confidence": str, "evidence": [str]},
    "remedies": [{"title": str, "diff": str, "safe": bool, "result": str, "effect": str}],
    "action": {"policy": str, "taken": str, "streak": int, "total": int},
}


def conform(value: Any, shape: Any, where: str = "incident") -> None:
    """Check a value against the shape of the contract, with the path to what is wrong."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), where
        for key, inner in shape.items():
            assert key in value, f"{where}.{key} is missing"
            conform(value[key], inner, f"{where}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for index, item in enumerate(value):
            conform(item, shape[0], f"{where}[{index}]")
    else:
        assert isinstance(value, shape), f"{where} is {value!r}"
        assert shape is not int or not isinstance(value, bool), f"{where} is {value!r}"


def test_incident_record_keeps_the_contract() -> None:
    """An incident record turns into every field of the contract, infinities included."""
    stats = TensorStats("p", "float32", (2, 3), nan=1, min=-math.inf, max=math.nan)
    incident = Incident(
        step=35,
        rank=0,
        time="2026-11-15T07:00:00Z",
        symptom=Symptom("loss", "inf", "loss"),
        origin=Origin(
            Phase.LOSS,
            Span("a.py", 3, 3, 4, 9, "f", "x / y"),
            "",
            "aten.div",
            inputs=(stats,),
            output=stats,
            samples=(0, 2),
            from_=(Span("b.py", 2, label="made here"),),
        ),
        cause=Cause("WN103", "division-by-zero", "division by zero", Confidence.PROVEN, ("1 of 6 is 0",)),
        remedies=(Remedy("add", "-a\n+b", False, "proven", "loss 1"),),
        action=Action("skip", "skipped", 1, 1),
    )
    read = json.loads(dumps(incident.to_json()), parse_constant=refuse)
    conform(read, CONTRACT)
    assert read["origin"]["phase"] == "loss"
    assert read["origin"]["inputs"][0]["min"] == "-inf"
    assert read["origin"]["inputs"][0]["max"] == "nan"
    assert read["origin"]["from"] == [
        {"file": "b.py", "line": 2, "end_line": 2, "column": 0, "end_column": 0, "function": "", "code": "", "indent": -1, "label": "made here"}
    ]
    assert read["cause"]["confidence"] == "proven"


def test_place_not_known_is_said_in_the_record() -> None:
    """A span is known only with file and line."""
    assert not NOWHERE.known
    assert not Span("a.py", 0).known
    assert Span("a.py", 1).known


RUN = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def spread(x):
        return x / x.std(0)

    for step in range(5):
        x = torch.randn(8, 4)
        if step == 1:
            x = x[:1].repeat(8, 1)
        optimizer.zero_grad()
        out = model(x)
        loss = spread(out).mean() if step == 1 else torch.sqrt((out * 0).square()).sum() if step == 3 else out.square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(step, repr(loss.item()))
"""


def test_files_of_a_run_keep_the_contract(box: Sandbox) -> None:
    """incidents.jsonl, metrics.jsonl and report.md of a real run, one incident born forward and one backward."""
    done = box.watched(RUN)
    assert done.status == 0, done.err
    assert [i["step"] for i in done.incidents] == [1, 3]
    for incident in done.incidents:
        conform(incident, CONTRACT)
        assert incident["schema"] == 1
        assert incident["rank"] == 0
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", incident["time"])
        assert incident["origin"]["phase"] in ("input", "parameter", "forward", "loss", "backward", "optimizer")
        assert incident["origin"]["end_column"] > incident["origin"]["column"]
        assert re.fullmatch(r"WN\d{3}", incident["cause"]["code"])
        assert incident["cause"]["confidence"] in ("proven", "suspected")
        assert incident["action"] == {"policy": "skip", "taken": "skipped", "streak": 1, "total": 1 + done.incidents.index(incident)}
    forward, backward = done.incidents
    assert forward["symptom"]["place"] == "loss"
    assert (forward["origin"]["phase"], forward["origin"]["line"], forward["origin"]["function"]) == ("loss", 10, "spread")
    assert (backward["symptom"]["place"], backward["symptom"]["name"]) == ("gradient", "weight")
    assert (backward["origin"]["phase"], backward["origin"]["line"]) == ("backward", 18)
    source = (box.folder / "train.py").read_text().splitlines()
    for incident in done.incidents:
        assert incident["origin"]["code"] == source[incident["origin"]["line"] - 1].strip()
        assert f"| {incident['step']} | {incident['cause']['code']} |" in done.report
        assert f"error[{incident['cause']['code']}]" in done.report


def test_metrics_of_a_run(box: Sandbox) -> None:
    """metrics.jsonl has one line per optimizer step with its loss, gradient norm and the learning rate it was taken with."""
    done = box.watched(RUN)
    assert [row["step"] for row in done.metrics] == [0, 1, 2, 3, 4]
    assert [row["lr"] for row in done.metrics] == [0.25, 0.125, 0.125, 0.0625, 0.0625]  # a skipped step does not move the scheduler
    printed = [line.split()[1] for line in done.out.splitlines()]
    assert [str(row["loss"]) for row in done.metrics] == printed
    healthy = [row for row in done.metrics if row["step"] not in (1, 3)]
    assert all(row["grad_norm"] > 0 for row in healthy)
    assert done.metrics[3]["grad_norm"] == "nan"


def test_metrics_without_an_optimizer(box: Sandbox) -> None:
    """A program that updates its weights by hand gets one line per step too."""
    done = box.watched(
        """
import torch
weight = torch.ones(3, requires_grad=True)
for step in range(4):
    loss = (weight * torch.arange(3.0)).square().sum()
    loss.backward()
    with torch.no_grad():
        weight -= 0.01 * weight.grad
    weight.grad = None
"""
    )
    assert [row["step"] for row in done.metrics] == [0, 1, 2, 3]


def test_an_update_by_hand_after_bad_derivatives_is_left_out(box: Sandbox) -> None:
    """Weights computed from something else (so that the tape knows them), `torch.autograd.grad`, an update in place."""
    done = box.watched(
        """
import torch
torch.manual_seed(0)
weight = (0.1 * torch.randn(3)).requires_grad_()
for step in range(4):
    before = weight.detach().clone()
    length = (weight - weight.detach()) if step == 2 else weight
    loss = length.square().sum().sqrt()
    (slope,) = torch.autograd.grad(loss, weight)
    with torch.no_grad():
        weight -= 0.01 * slope
    print(step, torch.equal(before, weight), bool(weight.isfinite().all()))
"""
    )
    assert done.out.splitlines() == ["0 False True", "1 False True", "2 True True", "3 False True"]
    assert [(i["step"], i["cause"]["code"], i["action"]["taken"]) for i in done.incidents] == [(2, "WN501", "skipped")]
