"""`whynan.stable` gives the plain form's numbers wherever those are finite, and true numbers over the whole range of a dtype."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_functions import ALL, DTYPES, ELEMENTWISE, HALF, ROWS, Pair, plain_sinkhorn, value_and_gradients, whole_range
from torch import Tensor

from whynan import stable

BY_NAME = {pair.name: pair for pair in ALL}
REAL = {  # of the argument and of a function that rounds a number to the dtype, as torch does with an exponent
    "sqrt": (lambda x, at: mpmath.sqrt(x), lambda x, at: 1 / (2 * mpmath.sqrt(x))),
    "log": (lambda x, at: mpmath.log(x), lambda x, at: 1 / x),
    "pow 0.6": (lambda x, at: x ** at(0.6), lambda x, at: at(0.6) * x ** at(0.6 - 1)),
    "pow -0.5": (lambda x, at: x**-0.5, lambda x, at: -0.5 * x**-1.5),
    "acos": (lambda x, at: mpmath.acos(x), lambda x, at: -1 / mpmath.sqrt(1 - x * x)),
    "asin": (lambda x, at: mpmath.asin(x), lambda x, at: 1 / mpmath.sqrt(1 - x * x)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", ELEMENTWISE, ids=str)
def test_elementwise_functions_equal_torch_to_the_last_bit_wherever_torch_is_finite(pair: Pair, dtype: torch.dtype) -> None:
    inputs = [whole_range(dtype)] if pair.inputs == 1 else [whole_range(dtype), whole_range(dtype).flip(0)]
    value, slopes = value_and_gradients(pair.plain, *inputs)
    ours, our_slopes = value_and_gradients(pair.ours, *inputs)
    finite = value.isfinite() & torch.stack([s.isfinite() for s in slopes]).all(0)
    assert finite.sum() > 1000
    assert torch.equal(ours[finite], value[finite])
    for mine, torchs in zip(our_slopes, slopes, strict=True):
        assert torch.equal(mine[finite], torchs[finite])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["sqrt", "log", "pow 0.6", "acos", "asin"])
def test_value_and_gradient_are_finite_for_every_finite_number(name: str, dtype: torch.dtype) -> None:
    value, slopes = value_and_gradients(BY_NAME[name].ours, whole_range(dtype))
    assert value.isfinite().all()
    assert slopes[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("name", REAL)
def test_elementwise_functions_are_true_against_mpmath_from_the_denormals_up(name: str, dtype: torch.dtype) -> None:
    edge = {torch.float16: 2.0**-16}.get(dtype, 2.0**-128) if name == "log" else 0
    inside = whole_range(dtype)
    inside = inside[(inside > edge) & (inside < (1 if name in ("acos", "asin") else math.inf))][::7]
    value, (slope,) = value_and_gradients(BY_NAME[name].ours, inside)
    with mpmath.workprec(200):
        true, steep = (exactly(function, inside) for function in REAL[name])
    eps = torch.finfo(dtype).eps
    assert_close_in(dtype, value, true, 4 * eps)
    # 1 - x² as torch computes it loses digits near 1: one rounding of x² against what is left
    lost = eps / (1 - inside.double() ** 2) if name in ("acos", "asin") else 0
    assert_close_in(dtype, slope, steep, 6 * eps + lost)


def exactly(function, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    def at(number: float) -> mpmath.mpf:
        return mpmath.mpf(torch.tensor(number, dtype=x.dtype).item())

    return torch.tensor([float(function(mpmath.mpf(number), at)) for number in x.double().tolist()], dtype=torch.float64)


def assert_close_in(dtype: torch.dtype, got: Tensor, true: Tensor, relative: float | Tensor) -> None:
    """Within a relative error, or a few of the smallest steps; what twice over the dtype cannot hold may be infinite."""
    limits = torch.finfo(dtype)
    error = (got.double() - true).abs()
    fine = error <= true.abs() * relative + 4 * limits.smallest_normal * limits.eps
    assert (fine | (true.abs() > limits.max / 2)).all(), (got[~fine][:5], true[~fine][:5])


TOLERANCES = {"masked_softmax": 0, "masked_mean": 0, "fraction_of_variance_unexplained": 0, "normalize": 8, "rms_norm": 8, "cosine_similarity": 16}


@pytest.mark.parametrize("pair", ROWS, ids=str)
def test_row_functions_equal_the_plain_form_within_the_stated_ulps(pair: Pair) -> None:
    inputs = pair.arguments()
    value, slopes = value_and_gradients(weighted(pair.plain), *inputs)
    ours, our_slopes = value_and_gradients(weighted(pair.ours), *inputs)
    ulps = TOLERANCES.get(pair.name, 80)
    for mine, plain in zip([ours, *our_slopes], [value, *slopes], strict=True):
        assert (mine - plain).abs().max() <= ulps * torch.finfo(plain.dtype).eps * plain.abs().max()


def weighted(function):  # type: ignore[no-untyped-def]
    """The same function with an uneven gradient: a softmax's sum has none."""

    def form(*inputs: Tensor) -> Tensor:
        out = function(*inputs)
        return out * torch.linspace(0.5, 2, out.numel(), dtype=out.dtype, device=out.device).square().reshape(out.shape)

    return form


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("pair", ROWS, ids=str)
def test_row_functions_in_half_precision_are_the_float64_ones_rounded(pair: Pair, dtype: torch.dtype) -> None:
    inputs = pair.arguments(dtype)
    value, slopes = value_and_gradients(pair.ours, *inputs)
    true, true_slopes = value_and_gradients(pair.plain, *(x.double() for x in inputs))
    for mine, exact in zip([value, *slopes], [true, *true_slopes], strict=True):
        scale = max(exact.abs().max().item(), 1.0)
        assert (mine.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("exponent", [-149, -140, -126, -100, -60, -41, -39, 0, 39, 41, 63, 100, 120, 125])
@pytest.mark.parametrize("name", ["normalize", "rms_norm", "cosine_similarity"])
def test_norms_are_right_at_every_length(name: str, exponent: int) -> None:
    pair = BY_NAME[name]
    inputs = [torch.ldexp(x, torch.tensor(exponent)) for x in pair.arguments()]
    value, slopes = value_and_gradients(weighted(pair.ours), *inputs)
    true, true_slopes = value_and_gradients(weighted(pair.plain), *(x.double() for x in inputs))
    assert (value.double() - true).abs().max() <= 1e-6 * max(1, true.abs().max())
    assert all(s.isfinite().all() for s in slopes)
    if exponent > -120:
        for mine, exact in zip(slopes, true_slopes, strict=True):
            assert (mine.double() - exact).abs().max() <= 1e-5 * exact.abs().max() + 1e-44


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_rms_norm_at_the_largest_numbers_is_one_not_zero(dtype: torch.dtype) -> None:
    x = torch.full((2, 4), torch.finfo(dtype).max, dtype=dtype)
    assert torch.equal(stable.rms_norm(x), torch.ones_like(x))


@pytest.mark.parametrize("scale", [1.0, 50.0, 200.0, 5000.0])
def test_sinkhorn_is_that_of_float64_where_exp_overflows(scale: float) -> None:
    torch.manual_seed(0)
    scores = torch.randn(5, 6, 6) * scale
    value, (slope,) = value_and_gradients(weighted(stable.sinkhorn), scores)
    true = scores.double().requires_grad_()
    logs = true
    for _ in range(20):
        logs = logs - logs.logsumexp(-1, keepdim=True)
        logs = logs - logs.logsumexp(-2, keepdim=True)
    exact = weighted(torch.exp)(logs)
    exact_slope = torch.autograd.grad(exact.sum(), true)[0]
    assert (value - exact).abs().max() <= 1e-3 * max(1, scale / 1000)
    assert (slope - exact_slope).abs().max() <= 1e-3 * max(1, scale / 1000)
    assert torch.allclose(stable.sinkhorn(scores).sum(-2), torch.ones(5, 6), atol=1e-5)
    if scale >= 200:
        assert not plain_sinkhorn(scores).isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.04, 0.005])
def test_mutual_information_has_the_true_gradient_of_mpmath_also_for_confident_and_disagreeing_pairs(temperature: float) -> None:
    torch.manual_seed(0)
    first, second, prior = torch.randn(4, 5) * 2, torch.randn(4, 5) * 2, torch.rand(5).softmax(0)
    first[0], second[0] = torch.tensor([9.0, 0, 0, 0, 0]), torch.tensor([0, 9.0, 0, 0, 0])
    value, (slope, _) = value_and_gradients(lambda a, b: stable.beta_mutual_information(a, b, prior, temperature=temperature), first, second)
    for row in range(4):
        exact, gradient = real_information(first[row], second[row], prior, temperature)
        assert value[row].item() == pytest.approx(exact, rel=1e-5, abs=1e-5)
        assert slope[row].tolist() == pytest.approx(gradient, rel=1e-4, abs=1e-5 / temperature)
    assert slope[0].abs().max() > 0.1 / temperature


def real_information(first: Tensor, second: Tensor, prior: Tensor, temperature: float) -> tuple[float, list[float]]:
    """Value and gradient for `first`, with 2000 bits."""
    with mpmath.workprec(2000):
        weights = [[mpmath.exp(mpmath.mpf(x) / mpmath.mpf(temperature)) for x in z.double().tolist()] for z in (first, second)]
        p, q = ([w / sum(row) for w in row] for row in weights)
        beta = mpmath.mpf(0.6)
        terms = [(a * b) ** beta / mpmath.mpf(c) for a, b, c in zip(p, q, prior.double().tolist(), strict=True)]
        share = [t / sum(terms) for t in terms]
        return float(mpmath.log(sum(terms))), [float(beta * (s - a) / mpmath.mpf(temperature)) for s, a in zip(share, p, strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=6), st.data())
def test_masked_mean_is_the_mean_of_what_is_kept_whatever_lies_under_the_mask(numbers: list[float], data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers)))
    hidden = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
    kept = [n / 1e3 for n, m in zip(numbers, mask, strict=True) if m]
    x = torch.tensor([n / 1e3 if m else hidden for n, m in zip(numbers, mask, strict=True)], dtype=torch.float64)
    value, (slope,) = value_and_gradients(lambda x: stable.masked_mean(x, torch.tensor(mask)), x)
    assert value.item() == pytest.approx(math.fsum(kept) / max(1, len(kept)), rel=1e-12, abs=1e-12 * max(map(abs, kept), default=0))
    assert slope.tolist() == [1 / len(kept) if m else 0.0 for m in mask]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=4, max_size=4), min_size=1, max_size=4), st.integers(0, 15))
def test_masked_softmax_is_the_softmax_of_what_is_kept(rows: list[list[float]], bits: int) -> None:
    scores = torch.tensor(rows)
    mask = torch.tensor([bool(bits >> i & 1) for i in range(4)])
    value, _ = value_and_gradients(lambda x: stable.masked_softmax(x, mask), scores)
    expected = torch.zeros_like(scores)
    if mask.any():
        expected[:, mask] = scores[:, mask].softmax(-1)
    assert torch.allclose(value, expected, rtol=1e-6, atol=1e-7)


def test_a_count_that_bfloat16_cannot_hold_does_not_bend_the_mean() -> None:
    x = torch.ones(1001, dtype=torch.bfloat16)
    assert stable.masked_mean(x, torch.ones(1001, dtype=torch.bool)) == 1
