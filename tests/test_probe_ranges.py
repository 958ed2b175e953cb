"""Ranges: an interval holds every value the operation can give, and what can leave its domain is listed with its path."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from probe_models import HAZARDS, HEALTHY, marked_line
from torch import nn

import whynan
from whynan.probing import intervals as iv
from whynan.probing.intervals import Interval
from whynan.probing.operations import OPERATIONS
from whynan.probing.ranges import Ranges, _Walk, ranges_of
from whynan.probing.steps import step_of
from whynan.probing.subject import subject_of

ends = st.floats(-50, 50).map(lambda v: round(v, 3))
spans = st.tuples(ends, ends).map(lambda p: Interval(min(p), max(p)))
shares = st.floats(0, 1)


def _in(x: Interval, share: float) -> float:
    return min(max(x.low + share * (x.high - x.low), x.low), x.high)


def _holds(x: Interval, value: float) -> bool:
    slack = 1e-6 * max(1.0, abs(value))
    return x.low - slack <= value <= x.high + slack


@given(spans, spans, shares, shares)
def test_sums_differences_products_and_unions_hold_their_values(x: Interval, y: Interval, s: float, t: float) -> None:
    a, b = _in(x, s), _in(y, t)
    assert _holds(x + y, a + b)
    assert _holds(x - y, a - b)
    assert _holds(x * y, a * b)
    assert _holds(x | y, a)
    assert _holds(x | y, b)


@given(spans, spans, shares, shares)
def test_quotients_hold_their_values_also_where_the_divisor_reaches_zero(x: Interval, y: Interval, s: float, t: float) -> None:
    a, b = _in(x, s), _in(y, t)
    if b != 0:
        assert _holds(x / y, a / b)


@given(spans, shares, st.sampled_from([-3.0, -2.0, -1.0, -0.5, 0.5, 1.5, 2.0, 3.0, 4.0]))
def test_powers_hold_their_values(x: Interval, share: float, exponent: float) -> None:
    value = _in(x, share)
    if value > 1e-6 or (value < -1e-6 and exponent == int(exponent)):
        assert _holds(iv.power(x, exponent), value**exponent)


@given(spans, shares)
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("exp", torch.exp), ("tanh", torch.tanh), ("sigmoid", torch.sigmoid), ("relu", torch.relu), ("gelu", F.gelu), ("silu", F.silu), ("abs", torch.abs),
        ("neg", torch.neg), ("square", torch.square), ("softplus", F.softplus), ("leaky_relu", F.leaky_relu), ("elu", F.elu), ("sin", torch.sin),
        ("atan", torch.atan), ("logsigmoid", F.logsigmoid), ("mish", F.mish), ("asinh", torch.asinh), ("expm1", torch.expm1),
    ],
)  # fmt: skip
def test_functions_of_one_value_hold_their_values(name: str, function: Any, x: Interval, share: float) -> None:
    class OneArgument:
        args = (x,)

        def at(self, place: int) -> Interval:
            return x

        def number(self, place: int, name: str = "") -> None:
            return None

    value = float(function(torch.tensor(_in(x, share), dtype=torch.float64)))
    assert _holds(OPERATIONS[name](OneArgument()), value)  # type: ignore[arg-type]


@given(st.integers(1, 6), st.integers(1, 6), spans, st.integers(0, 1000))
def test_an_affine_map_holds_its_values(columns: int, rows: int, x: Interval, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(rows, columns, generator=gen).double(), torch.randn(rows, generator=gen).double()
    points = x.low + (x.high - x.low) * torch.rand(20, columns, generator=gen).double()
    made = F.linear(points, weight, bias)
    found = iv.linear(x, weight, bias)
    assert _holds(found, float(made.min()))
    assert _holds(found, float(made.max()))


@given(st.integers(1, 8), spans, st.integers(0, 1000))
def test_softmax_and_normalisation_hold_their_values(size: int, x: Interval, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    points = x.low + (x.high - x.low) * torch.rand(10, size, generator=gen).double()
    shares_ = points.softmax(-1)
    found = iv.softmax(x, size)
    assert _holds(found, float(shares_.min()))
    assert _holds(found, float(shares_.max()))
    normal = iv.normalised(size, Interval(1, 1), Interval(0, 0))
    made = F.layer_norm(points, (size,))
    assert _holds(normal, float(made.min()))
    assert _holds(normal, float(made.max()))


def test_an_interval_that_is_not_a_number_is_everything() -> None:
    assert iv.made(math.nan, 1) == iv.ANY
    assert Interval(-math.inf, math.inf) - Interval(-math.inf, math.inf) == iv.ANY


# -- graphs -----------------------------------------------------------------------------------------------------


def _ranges(made: Any) -> Ranges:
    return ranges_of(step_of(subject_of(made)))


@pytest.mark.parametrize("name", ["distance", "unexplained_variance", "percentage", "log_power", "correlation"])
def test_the_hazardous_line_is_among_the_operations_that_can_leave_their_domain(name: str) -> None:
    places = [h.place for h in _ranges(HAZARDS[name]()).hazards]
    assert any(place.endswith(f"probe_models.py:{marked_line(name)}") for place in places), places


def test_the_path_goes_from_the_operation_back_to_the_input() -> None:
    found = _ranges(HAZARDS["unexplained_variance"]()).hazards[0]
    assert found.operation == "div"
    assert found.argument.low == 0
    assert [word.split(" [")[0] for word in found.path] == ["sum", "square", "sub", "batch"]
    assert str(found).startswith("div of [0, ")


def test_an_epsilon_keeps_an_operation_in_its_domain() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return torch.sqrt(y.square().sum(-1) + 1e-6).mean() + torch.log(y.abs().clamp_min(1e-3)).mean() + (y / (1 + y.square())).mean()

    assert _ranges((nn.Linear(3, 2), loss_fn, torch.randn(4, 3))).hazards == ()


@pytest.mark.parametrize("factory", [f for f in HEALTHY if f.__name__ in ("mlp", "cnn_with_batchnorm", "vae", "focal", "attention")], ids=lambda f: f.__name__)
def test_healthy_models_have_no_operation_that_can_leave_its_domain(factory: Any) -> None:
    assert _ranges(factory()).hazards == ()


def test_stated_bounds_decide() -> None:
    def loss_fn(out: torch.Tensor, batch: Any) -> torch.Tensor:
        return (out.squeeze(-1) / batch[1]).mean()

    batch = (torch.randn(4, 3), torch.rand(4) + 1)
    wide = {"model": nn.Linear(3, 1), "loss_fn": loss_fn, "batch": batch, "bounds": {"1": (0.0, 5.0)}}
    assert [h.operation for h in _ranges(wide).hazards] == ["div"]
    assert _ranges({**wide, "bounds": {"1": (0.5, 5.0)}}).hazards == ()


def test_exp_that_can_overflow_is_listed_with_its_reason() -> None:
    found = _ranges((nn.Linear(2, 1), lambda out, b: out.exp().mean(), {"input": torch.randn(4, 2) * 200})).hazards
    assert [h.operation for h in found] == ["exp"]
    assert "88.7" in found[0].why


def test_unknown_operations_are_said_to_be_unknown() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.log(torch.special.i1e(model(x)) + 2).mean()

    made = (nn.Linear(3, 2), loss_fn, torch.randn(4, 3))
    found = _ranges(made)
    assert found.unknown == {"special_i1e": 1}
    assert [h.operation for h in found.hazards] == ["log"]
    report = whynan.probe(*made, budget=0)
    assert any("special_i1e 1" in n.text for n in report.notes)
    assert "1 unknown" in next(v.text for v in report.verdicts if v.group == "ranges")


def test_a_step_that_cannot_be_exported_is_told_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        return y.mean() if float(y.sum()) > 0 else -y.mean()

    report = whynan.probe(nn.Linear(3, 2), loss_fn, torch.randn(4, 3), budget=0)
    assert next(v for v in report.verdicts if v.group == "ranges").state == "not run"
    assert report.ok
    note = next(n for n in report.notes if n.attack == "torch.export failed")
    assert "\n" not in note.text
    assert "def forward" not in capfd.readouterr().err


@pytest.mark.parametrize("factory", [*HEALTHY, *HAZARDS.values()], ids=lambda f: f.__name__)
def test_every_observed_value_lies_in_the_range_that_was_computed(factory: Any) -> None:
    """Run the exported graph on the sample and compare each value with its interval."""
    step = step_of(subject_of(factory()))
    values = tuple(i.value.detach() for i in step.inputs)
    from whynan.probing.ranges import _silence, _Whole

    with step.still(), _silence():
        try:
            program = torch.export.export(_Whole(step), values, strict=False)
        except Exception:
            pytest.skip("cannot be exported")
    walk = _Walk(program, step, {})
    walk.run()
    wrong = []

    class Compare(torch.fx.Interpreter):
        def run_node(self, n: Any) -> Any:
            made = super().run_node(n)
            known = walk.known.get(n)
            if n.op == "call_function" and isinstance(made, torch.Tensor) and known is not None and made.numel() and not made.is_complex():
                wide = made.detach().double()
                if bool(torch.isfinite(wide).all()) and not (_holds(known, float(wide.min())) and _holds(known, float(wide.max()))):
                    wrong.append((n.name, known, float(wide.min()), float(wide.max())))
            return made

    with step.still():
        _interpret(Compare, program, values)
    assert not wrong


def _interpret(kind: Any, program: Any, values: tuple[torch.Tensor, ...]) -> None:
    signature = program.graph_signature
    state = {**dict(program.named_parameters()), **dict(program.named_buffers()), **program.constants}
    homes = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    given_ = iter(values)
    arguments = [state[homes[n.name]] if n.name in homes else next(given_) for n in program.graph.nodes if n.op == "placeholder"]
    kind(program.graph_module).run(*arguments)
