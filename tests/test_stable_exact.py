"""`whynan.stable` gives the plain form's numbers wherever those are finite, and true numbers over the whole range of a dtype."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_functions import ALL, DTYPES, ELEMENTWISE, HALF, ROWS, Pair, plain_sinkhorn, ulp, uneven, value_and_gradients, whole_range
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
    assert all(torch.equal(mine[finite], torchs[finite]) for mine, torchs in zip(our_slopes, slopes, strict=True))
    alone = [x[finite] for x in inputs]  # without an edge among them there is another way through the code
    value, slopes = value_and_gradients(pair.plain, *alone)
    ours, our_slopes = value_and_gradients(pair.ours, *alone)
    assert torch.equal(ours, value)
    assert all(torch.equal(mine, torchs) for mine, torchs in zip(our_slopes, slopes, strict=True))


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


SIZES = (1.0, 1e-3, 1e3, 1e-7, 1e4, 1e-30, 1e15)


def fitting(dtype: torch.dtype) -> list[float]:
    return [size for size in SIZES if size < torch.finfo(dtype).max / 6]


def ragged(dtype: torch.dtype, size: float) -> tuple[Tensor, Tensor]:
    """Numbers of that size, and a mask that leaves one or more in each row."""
    draw = torch.Generator().manual_seed(3)
    mask = torch.rand(48, 130, generator=draw) < 0.6
    mask[:, 7] = True
    return (torch.randn(48, 130, generator=draw, dtype=torch.float64) * size).to(dtype), mask


@pytest.mark.parametrize("dead", [False, True], ids=["all rows alive", "a dead row among them"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_softmax_equals_the_plain_form_to_the_last_bit(dtype: torch.dtype, dead: bool) -> None:
    for size in fitting(dtype):
        x, mask = ragged(dtype, size)
        mask[5] &= not dead
        alive = mask.any(-1)
        value, (slope,) = value_and_gradients(uneven(lambda x, m=mask: stable.masked_softmax(x, m)), x)
        plain, (true,) = value_and_gradients(uneven(lambda x, m=mask: x.masked_fill(~m, -math.inf).softmax(-1)), x)
        assert alive.sum() == 48 - dead
        assert torch.equal(value[alive], plain[alive])
        assert torch.equal(slope[alive], true[alive])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_mean_equals_the_plain_form_to_the_last_bit_and_is_rounded_once_from_float32_in_half_precision(dtype: torch.dtype) -> None:
    for size in fitting(dtype):
        x, mask = ragged(dtype, size)
        value, (slope,) = value_and_gradients(uneven(lambda x, m=mask: stable.masked_mean(x, m, -1)), x)
        wide = x.float() if dtype in HALF else x
        plain, (true,) = value_and_gradients(lambda x, m=mask: uneven(lambda x: ((x * m).sum(-1) / m.sum(-1)).to(dtype))(x), wide)
        assert torch.equal(value, plain)
        assert torch.equal(slope, true.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_fraction_of_variance_equals_the_plain_form_to_the_last_bit(dtype: torch.dtype) -> None:
    pair = BY_NAME["fraction_of_variance_unexplained"]
    for size in (1e-15, 1.0, 1e15):
        inputs = [ragged(dtype, size)[0], ragged(dtype, size)[0].flip(0) * 1.5]
        value, slopes = value_and_gradients(pair.ours, *inputs)
        plain, true = value_and_gradients(pair.plain, *inputs)
        assert torch.equal(value, plain)
        assert all(torch.equal(a, b) for a, b in zip(slopes, true, strict=True))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("pair", [p for p in ROWS if p.name != "masked_softmax"], ids=str)
def test_in_half_precision_row_functions_are_those_of_float32_rounded_once_if_at_all(pair: Pair, dtype: torch.dtype) -> None:
    inputs = pair.arguments(dtype)
    value, slopes = value_and_gradients(pair.ours, *inputs)
    wide, wide_slopes = value_and_gradients(pair.ours, *(x.float() for x in inputs))
    assert value.dtype == (torch.float32 if pair.name in ("fraction_of_variance_unexplained", "beta_mutual_information") else dtype)
    assert torch.equal(value, wide.to(value.dtype))
    for mine, exact in zip(slopes, wide_slopes, strict=True):
        assert torch.equal(mine, exact.to(dtype))


# of docs/stable.md: the value in ulps (of 1 for a cosine), beside the plain form and beside float64; the gradient in eps over the length, beside either
STATED = {"normalize": (0, 4, 4), "rms_norm": (5, 6, 6), "cosine_similarity": (2, 3, 4)}
WIDTHS = (1, 2, 3, 8, 64, 512, 2048)


@pytest.mark.parametrize("guarded", [False, True], ids=["ordinary rows alone", "with a row of zeros"])
@pytest.mark.parametrize("name", STATED)
def test_norms_equal_the_plain_form_within_the_stated_ulps(name: str, guarded: bool) -> None:
    pair, (beside_plain, _, of_gradient) = BY_NAME[name], STATED[name]
    for width in WIDTHS:
        inputs = pair.arguments(rows=24, width=width)
        value, slopes = value_and_gradients(uneven(pair.ours), *([x.index_fill(0, torch.tensor(23), 0) for x in inputs] if guarded else inputs))
        plain, plain_slopes = value_and_gradients(uneven(pair.plain), *inputs)
        rows = slice(0, 23)
        steps = ulp(plain if name != "cosine_similarity" else torch.ones_like(plain), torch.float32)
        assert ((value - plain).abs() <= beside_plain * steps)[rows].all()
        for mine, true, x in zip(slopes, plain_slopes, inputs, strict=True):
            assert ((mine - true).abs() <= of_gradient * 2.0**-23 / length(name, x))[rows].all()


def length(name: str, x: Tensor) -> Tensor:
    """What the vectors are divided by, in float64."""
    wide = x.double()
    return (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() if name == "rms_norm" else wide.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("width", [1, 8, 300])
@pytest.mark.parametrize("name", STATED)
def test_norms_are_those_of_float64_within_the_stated_ulps_from_the_denormals_to_the_largest_numbers(name: str, width: int) -> None:
    pair, (_, of_value, of_gradient) = BY_NAME[name], STATED[name]
    exponents = torch.arange(-149, 125)[:, None]
    inputs = [torch.ldexp(x, exponents) for x in pair.arguments(rows=len(exponents), width=width)]
    value, slopes = value_and_gradients(uneven(pair.ours), *inputs)
    true, true_slopes = value_and_gradients(uneven(pair.plain), *(x.double() for x in inputs))
    some = torch.stack([x.abs().amax(-1) > 0 for x in inputs]).all(0)
    assert some.sum() > 265
    steps = ulp(true if name != "cosine_similarity" else torch.ones_like(true), torch.float32)
    assert ((value - true).abs() <= of_value * steps)[some].all()
    for mine, exact, x in zip(slopes, true_slopes, inputs, strict=True):
        assert mine[exact.abs() < 2.0**127].isfinite().all()
        size = length(name, x)
        counts = some & (size[:, 0] > 2.0**-128) & (exact.abs().amax(-1) < 2.0**127)
        assert counts.sum() > 245
        bound = of_gradient * 2.0**-23 / size + 4 * 2.0**-149
        assert ((mine - exact).abs() <= bound)[counts].all()
        if name != "rms_norm":
            assert (mine[size[:, 0] < 2.0**-128] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
def test_rms_norm_at_the_largest_numbers_is_one_not_zero(dtype: torch.dtype) -> None:
    x = torch.full((2, 4), torch.finfo(dtype).max, dtype=dtype)
    assert torch.equal(stable.rms_norm(x), torch.ones_like(x))


@pytest.mark.parametrize("name", ["sinkhorn", "beta_mutual_information"])
def test_log_space_equals_the_plain_form_within_the_stated_error(name: str) -> None:
    pair = BY_NAME[name]
    for size in (0.1, 1.0, 4.0):
        inputs = [x * size for x in pair.arguments(rows=8)]
        value, slopes = value_and_gradients(uneven(pair.ours), *inputs)
        for dtype in (torch.float32, torch.float64):
            plain, plain_slopes = value_and_gradients(uneven(pair.plain), *(x.to(dtype) for x in inputs))
            for mine, true in zip([value, *slopes], [plain, *plain_slopes], strict=True):
                assert (mine - true).abs().max() <= 1e-5 * true.abs().max()


@pytest.mark.parametrize("scale", [1.0, 50.0, 200.0, 5000.0])
def test_sinkhorn_is_that_of_float64_where_exp_overflows(scale: float) -> None:
    torch.manual_seed(0)
    scores = torch.randn(5, 6, 6) * scale
    value, (slope,) = value_and_gradients(uneven(stable.sinkhorn), scores)
    exact, (exact_slope,) = value_and_gradients(uneven(log_sinkhorn), scores.double())
    stated = 1e-5 + 1e-6 * scores.abs().max()
    assert (value - exact).abs().max() <= stated
    assert (slope - exact_slope).abs().max() <= stated
    assert torch.allclose(stable.sinkhorn(scores).sum(-2), torch.ones(5, 6), atol=1e-5)
    if scale >= 200:
        assert not plain_sinkhorn(scores).isfinite().all()


def log_sinkhorn(scores: Tensor) -> Tensor:
    for _ in range(20):
        scores = scores - scores.logsumexp(-1, keepdim=True)
        scores = scores - scores.logsumexp(-2, keepdim=True)
    return scores.exp()


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


@settings(max_examples=60)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2, max_size=6), st.data())
def test_masked_mean_is_the_mean_of_what_is_kept_whatever_lies_under_the_mask(numbers: list[float], data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(numbers), max_size=len(numbers)))
    hidden = data.draw(st.sampled_from([math.nan, math.inf, -math.inf, 0.0]))
    kept = [n / 1e3 for n, m in zip(numbers, mask, strict=True) if m]
    x = torch.tensor([n / 1e3 if m else hidden for n, m in zip(numbers, mask, strict=True)], dtype=torch.float64)
    value, (slope,) = value_and_gradients(lambda x: stable.masked_mean(x, torch.tensor(mask)), x)
    assert value.item() == pytest.approx(math.fsum(kept) / max(1, len(kept)), rel=1e-12, abs=1e-12 * max(map(abs, kept), default=0))
    assert slope.tolist() == [1 / len(kept) if m else 0.0 for m in mask]


@settings(max_examples=60)
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
