"""What `whynan.stable` does at the edge, by design: stated values, gradients alive where the true one is, nothing bad hidden."""

from __future__ import annotations

import doctest
import importlib
import math
import subprocess
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from stable_functions import value_and_gradients
from torch import Tensor

import whynan
from whynan import stable

NAN, INF = math.nan, math.inf
ROOMS = ["arcs", "averages", "codec", "elementwise", "information", "masked", "norms", "transport", "variance"]


@pytest.mark.parametrize("room", ROOMS)
def test_every_example_in_a_docstring_runs(room: str) -> None:
    result = doctest.testmod(importlib.import_module(f"whynan.stable.{room}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_every_function_says_plain_form_edge_and_cost() -> None:
    for name in stable.__all__:
        text = getattr(stable, name).__doc__
        assert all(part in text for part in ("The plain form", "At the edge", "Cost:", ">>> ")), name


def test_importing_whynan_does_not_load_torch_and_stable_is_reached_from_it() -> None:
    program = "import sys, whynan; assert 'stable' in whynan.__all__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert whynan.stable.sqrt is stable.sqrt


EDGES: list[tuple[str, Callable[[Tensor], Tensor], float, float, float]] = [
    ("sqrt", stable.sqrt, 0.0, 0.0, 0.0),
    ("sqrt", stable.sqrt, -1e-9, 0.0, 0.0),
    ("sqrt", lambda x: stable.sqrt(x, max_slope=100.0), 0.0, 0.0025, 100.0),
    ("log", stable.log, 0.0, math.log(2.0**-128), 0.0),
    ("log", stable.log, -3.0, math.log(2.0**-128), 0.0),
    ("log", lambda x: stable.log(x, max_slope=1e6), 0.0, -math.log(1e6) - 1, 1e6),
    ("div", lambda x: stable.div(1.0, x), 0.0, 0.0, 0.0),
    ("div", lambda x: stable.div(1.0, x), -0.0, 0.0, 0.0),
    ("div", lambda x: stable.div(1.0, x, least=1e-3), 1e-3, 0.0, 0.0),
    ("pow", lambda x: stable.pow(x, 0.6), 0.0, 0.0, 0.0),
    ("pow", lambda x: stable.pow(x, 0.6), -1.0, 0.0, 0.0),
    ("pow", lambda x: stable.pow(x, 1.5), 0.0, 0.0, 0.0),
    ("pow", lambda x: stable.pow(x, -0.5), 0.0, 0.0, 0.0),
    ("pow", lambda x: stable.pow(x, -2), 0.0, 0.0, 0.0),
    ("acos", stable.acos, 1.0, 0.0, 0.0),
    ("acos", stable.acos, -1.0000001, math.pi, 0.0),
    ("acos", lambda x: stable.acos(x, max_slope=1000.0), 1.0, 0.0005, -1000.0),
    ("asin", stable.asin, 1.0000001, math.pi / 2, 0.0),
    ("asin", lambda x: stable.asin(x, max_slope=10.0), -1.0, math.asin(-math.sqrt(0.99)) - 10 * (1 - math.sqrt(0.99)), 10.0),
]


@pytest.mark.parametrize(("name", "function", "at", "value", "slope"), EDGES)
def test_the_value_and_slope_at_the_edge_are_the_stated_ones(name: str, function: Callable[[Tensor], Tensor], at: float, value: float, slope: float) -> None:
    got, (gradient,) = value_and_gradients(function, torch.tensor([at]))
    assert got.item() == pytest.approx(value, rel=1e-5, abs=1e-4 * (slope != 0))
    assert gradient.item() == pytest.approx(slope)


def test_where_the_tangent_begins_the_slope_counts_once() -> None:
    for function, knee, slope in (
        (lambda x: stable.sqrt(x, max_slope=0.5), 1.0, 0.5),
        (lambda x: stable.log(x, max_slope=2.0), 0.5, 2.0),
        (lambda x: stable.pow(x, 0.5, max_slope=0.5), 1.0, 0.5),
        (lambda x: stable.asin(x, max_slope=1.25), 0.6, 1.25),
    ):
        for other in (0.9, -0.9):  # with and without an element on the tangent
            _, (got,) = value_and_gradients(function, torch.tensor([knee, other]))
            assert got[0].item() == pytest.approx(slope)


@pytest.mark.parametrize("grad", [0.0, 1e30])
@pytest.mark.parametrize(("name", "function", "at", "value", "slope"), EDGES)
def test_no_node_of_the_backward_pass_makes_a_nan_at_the_edge(
    name: str, function: Callable[[Tensor], Tensor], at: float, value: float, slope: float, grad: float
) -> None:
    x = torch.tensor([at], requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        function(x).backward(torch.tensor([grad]))
    assert x.grad is not None
    assert x.grad.isfinite().all()


BAD: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": stable.sqrt,
    "sqrt with a slope": lambda x: stable.sqrt(x, max_slope=9.0),
    "log": stable.log,
    "div": lambda x: stable.div(x, torch.tensor(0.0)),
    "by": lambda x: stable.div(1.0, x),
    "pow": lambda x: stable.pow(x, 0.6),
    "acos": stable.acos,
    "masked_softmax": lambda x: stable.masked_softmax(x.expand(2), torch.tensor([True, True])),
    "masked_mean": lambda x: stable.masked_mean(x.expand(2), torch.tensor([True, False])),
    "normalize": lambda x: stable.normalize(x.expand(2)),
    "rms_norm": lambda x: stable.rms_norm(x.expand(2)),
    "cosine_similarity": lambda x: stable.cosine_similarity(x.expand(2), torch.ones(2)),
    "sinkhorn": lambda x: stable.sinkhorn(x.expand(2, 2)),
    "beta_mutual_information": lambda x: stable.beta_mutual_information(x.expand(1, 2), torch.ones(1, 2), torch.ones(2) / 2),
    "variance, constant": lambda x: stable.fraction_of_variance_unexplained(x.expand(4, 2), torch.ones(4, 2)),
    "variance, given": lambda x: stable.fraction_of_variance_unexplained(x.expand(4, 2), torch.ones(4, 2), variance=torch.tensor(1.0)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_nan_that_comes_in_is_not_hidden(name: str) -> None:
    assert BAD[name](torch.tensor(NAN)).isnan().any()


@pytest.mark.parametrize("name", ["sqrt", "sqrt with a slope", "log", "pow"])
def test_infinity_stays_infinity_as_in_torch(name: str) -> None:
    value, (slope,) = value_and_gradients(BAD[name], torch.tensor(INF))
    assert value == INF
    assert slope == 0


def test_dividing_by_infinity_is_zero_as_in_torch() -> None:
    assert torch.equal(stable.div(torch.ones(2), torch.tensor([INF, -INF])), torch.tensor([0.0, -0.0]))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: stable.sqrt(torch.ones(1), max_slope=0.0), "max_slope must be positive, got 0.0"),
        (lambda: stable.sqrt(torch.ones(1, dtype=torch.float16), max_slope=1e4), "max_slope 10000 is beyond float16"),
        (lambda: stable.acos(torch.ones(1), max_slope=0.5), "max_slope must be 1 or more, got 0.5"),
        (lambda: stable.pow(torch.ones(1), 1.5, max_slope=2.0), "exponents between 0 and 1, got 1.5"),
        (lambda: stable.pow(torch.ones(1), torch.ones(1)), "one number, not a tensor"),  # type: ignore[arg-type]
        (lambda: stable.div(1.0, torch.ones(1), least=-1.0), "least must be 0 or more, got -1.0"),
        (lambda: stable.masked_softmax(torch.ones(2), torch.ones(2)), "mask must be boolean"),
        (lambda: stable.masked_mean(torch.ones(2), torch.ones(2)), "mask must be boolean"),
        (lambda: stable.rms_norm(torch.ones(2), eps=0.0), "eps is 0"),
        (lambda: stable.rms_norm(torch.ones(2), eps=1e-50), "eps is 1e-50"),
        (lambda: stable.sinkhorn(torch.ones(2, 2), 0), "iterations must be 1 or more"),
        (lambda: stable.beta_mutual_information(torch.ones(2), torch.ones(2), torch.ones(2), temperature=0.0), "must be positive, got 0.6 and 0.0"),
        (lambda: stable.fraction_of_variance_unexplained(torch.ones(2), torch.ones(2), floor=-1.0), "floor must be 0 or more"),
        (lambda: stable.MovingAverage(momentum=1.0), "momentum must be at least 0 and below 1"),
        (lambda: stable.MovingAverage(3)(torch.ones(2)), r"shape \(3,\), the value \(2,\)"),
        (lambda: stable.tokens_to_rgb(torch.tensor([1.0])), "whole numbers"),
        (lambda: stable.tokens_to_rgb(torch.tensor([1]), 2**24 + 1), "three bytes hold"),
        (lambda: stable.rgb_to_tokens(torch.ones(2, 2)), "must hold 3 numbers"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_with_its_value(call: Callable[[], object], said: str) -> None:
    with pytest.raises((ValueError, TypeError), match=said):
        call()


def test_a_dead_row_of_a_masked_softmax_is_zero_and_the_other_rows_keep_their_gradient() -> None:
    scores, mask = torch.randn(3, 4), torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    scores[1, 2] = NAN
    weight = torch.randn(3, 4)
    value, (slope,) = value_and_gradients(lambda x: stable.masked_softmax(x, mask) * weight, scores)
    plain, (true,) = value_and_gradients(lambda x: x.softmax(-1) * weight, scores)
    assert (value[1] == 0).all()
    assert (slope[1] == 0).all()
    assert torch.equal(value[[0, 2]], plain[[0, 2]])
    assert torch.equal(slope[[0, 2]], true[[0, 2]])


def test_masked_softmax_takes_scores_that_are_minus_infinity_already_a_smaller_mask_and_another_dimension() -> None:
    scores = torch.tensor([[1.0, -INF], [-INF, -INF]])
    assert torch.equal(stable.masked_softmax(scores), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    assert torch.equal(stable.masked_softmax(torch.zeros(2, 1, 3), torch.tensor([True, False, False]))[:, 0], torch.tensor([[1.0, 0, 0]] * 2))
    assert torch.equal(stable.masked_softmax(torch.zeros(3), torch.eye(3, dtype=torch.bool)), torch.eye(3))
    assert torch.equal(stable.masked_softmax(scores, dim=0), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))


def test_attention_of_a_sample_that_is_all_padding_trains_the_others() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(3))
    valid = torch.tensor([[True, True, False], [False, False, False]])[:, None, :]
    (stable.masked_softmax(query @ key.transpose(-1, -2), valid) @ value).square().sum().backward()
    for x in (query, key, value):
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert x.grad[0].abs().sum() > 0
        assert x.grad[1].abs().sum() == 0


def test_rms_norm_has_the_slope_of_eps_inside_the_root() -> None:
    _, (slope,) = value_and_gradients(stable.rms_norm, torch.zeros(1, 4))
    assert torch.allclose(slope, torch.full((1, 4), 1e3))
    assert stable.rms_norm(torch.ones(2, 3, dtype=torch.float16), torch.full((3,), 2.0, dtype=torch.float16), eps=1e-20).eq(2).all()
    assert torch.equal(stable.rms_norm(torch.full((2, 3), 3.0), torch.tensor([1.0, 2.0]), dim=0), torch.tensor([[1.0] * 3, [2.0] * 3]))


def test_a_clamped_product_kills_the_gradient_that_log_space_keeps() -> None:
    first, second = torch.tensor([[9.0, 0.0, 0.0]]), torch.tensor([[0.0, 9.0, 0.0]])
    prior = torch.full((3,), 1 / 3)

    def clamped(a: Tensor, b: Tensor) -> Tensor:
        product = ((a / 0.05).softmax(-1) * (b / 0.05).softmax(-1)).clamp_min(1e-8)
        return (product.pow(0.6) / prior).sum(-1).log()

    _, dead = value_and_gradients(clamped, first, second)
    _, alive = value_and_gradients(lambda a, b: stable.beta_mutual_information(a, b, prior, temperature=0.05), first, second)
    assert all((g == 0).all() for g in dead)
    assert all(g.abs().max() > 1 for g in alive)


def test_a_prior_of_zero_leaves_value_and_gradient_finite() -> None:
    value, slopes = value_and_gradients(stable.beta_mutual_information, torch.randn(3, 4), torch.randn(3, 4), torch.tensor([0.5, 0.5, 0.0, 0.0]))
    assert value.isfinite().all()
    assert slopes[0].isfinite().all()


def constant_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(64, 16), torch.randn(16).expand(64, 16).contiguous() * 3.7


def test_a_batch_without_variance_is_skipped_with_its_graph_also_where_rounding_leaves_a_rest() -> None:
    prediction, target = constant_batch()
    total = (target - target.mean(0)).square().sum()
    assert 0 < total < 1e-9, "rounding should leave a rest here"
    value, (slope, _) = value_and_gradients(stable.fraction_of_variance_unexplained, prediction, target)
    assert value == 0
    assert (slope == 0).all()


def test_a_running_variance_and_a_floor_keep_the_gradient_of_a_constant_batch_alive() -> None:
    prediction, target = constant_batch()
    running = stable.RunningVariance()
    running(torch.randn(64, 16))
    variance = running(target)
    for form in (
        lambda p: stable.fraction_of_variance_unexplained(p, target, variance=variance),
        lambda p: stable.fraction_of_variance_unexplained(p, target, floor=0.01),
    ):
        value, (slope,) = value_and_gradients(form, prediction)
        assert 0 < value < 1000
        assert slope.abs().max() > 0


def test_a_running_variance_over_many_batches_is_the_variance() -> None:
    torch.manual_seed(0)
    running = stable.RunningVariance(momentum=0.9)
    for _ in range(50):
        running(torch.randn(256, 4) * 2 + 100)
    assert running.eval()(torch.ones(1)).item() == pytest.approx(4, rel=0.1)
    assert running.training is False


def test_a_moving_average_survives_a_nan_and_says_so_once() -> None:
    average = stable.MovingAverage(3, momentum=0.5)
    average(torch.tensor([1.0, 2.0, 3.0]))
    with pytest.warns(RuntimeWarning, match="refused 2 values") as said:
        after = average(torch.tensor([NAN, INF, 5.0]))
        average(torch.tensor([NAN, 2.0, 4.0]))
    assert len(said) == 1
    assert said[0].filename == __file__
    assert after.tolist() == [1.0, 2.0, 4.0]
    assert average.average.tolist() == [1.0, 2.0, 4.0]
    assert average.refused == 3
    assert "refused=3" in repr(average)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_moving_average_is_first_the_mean_and_then_lerp_to_the_last_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    average, values = stable.MovingAverage(4, momentum=0.9, dtype=dtype), torch.rand(30, 4).to(dtype)
    for step, value in enumerate(values):
        before = average.average.clone()
        after = average(value)
        assert torch.equal(after, average.average)
        if step < 10:
            assert torch.allclose(after, values[: step + 1].mean(0), rtol=4 * torch.finfo(dtype).eps)
        else:
            assert torch.equal(after, before.lerp(value, 1 - 0.9))


def test_a_moving_average_leaves_an_old_graph_alone_and_goes_on_from_what_was_saved() -> None:
    average, x = stable.MovingAverage(4, momentum=0.5), torch.ones(4, requires_grad=True)
    losses = [(x * average(torch.full((4,), float(i)))).sum() for i in range(6)]
    for loss in losses:
        loss.backward()
    again = stable.MovingAverage(4, momentum=0.5)
    again.load_state_dict(average.state_dict())
    assert torch.equal(again(torch.ones(4)), average(torch.ones(4)))
    again.load_state_dict(stable.MovingAverage(4).state_dict())  # full no more
    assert again(torch.full((4,), 7.0)).tolist() == [7.0] * 4
    assert torch.equal(average.eval()(torch.full((4,), NAN)), average.average)


def test_tokens_go_to_colours_and_back_and_ids_outside_are_refused_with_their_position() -> None:
    ids = torch.tensor([[0, 255, 256], [65535, 65536, 256**3 - 1]])
    rgb = stable.tokens_to_rgb(ids)
    assert rgb.dtype == torch.uint8
    assert torch.equal(stable.rgb_to_tokens(rgb), ids)
    assert torch.equal(stable.rgb_to_tokens(rgb.float() + 0.4), ids)
    assert stable.rgb_to_tokens(torch.zeros(0, 3)).shape == (0,)
    for bad, said in ((-1, r"token id -1 at position \[1, 2\] is outside 0..50256"), (50257, r"token id 50257 at position \[1, 2\]")):
        with pytest.raises(ValueError, match=said):
            stable.tokens_to_rgb(torch.tensor([[1, 2, 3], [4, 5, bad]]), 50257)


def test_colours_that_are_no_bytes_are_refused_or_clipped_and_nan_always_refused() -> None:
    with pytest.raises(ValueError, match=r"colour 260 at position \[0, 1\] is outside 0..255"):
        stable.rgb_to_tokens(torch.tensor([[0.0, 260.0, 1.0]]))
    assert stable.rgb_to_tokens(torch.tensor([[-3.0, 0.0, 300.0]]), clip=True).tolist() == [255]
    assert stable.rgb_to_tokens(torch.tensor([[255, 255, 255]]), 50257, clip=True).tolist() == [50256]
    with pytest.raises(ValueError, match=r"token id 65536 at position \[0\]"):
        stable.rgb_to_tokens(torch.tensor([[1, 0, 0]]), 50257)
    for clip in (True, False):
        with pytest.raises(ValueError, match=r"colour nan at position \[0, 2\]"):
            stable.rgb_to_tokens(torch.tensor([[0.0, 0.0, NAN]]), clip=clip)


def test_training_through_the_edges_lowers_the_loss() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 8)
    x[::4] = 0
    layer = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            distance = stable.sqrt((layer(stable.normalize(x)) - x).square().sum(-1))
            angle = stable.acos(stable.cosine_similarity(layer(x), x))
            loss = distance.mean() + angle.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
