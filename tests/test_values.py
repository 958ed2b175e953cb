"""Looking at tensors of every kind: what counts as damage, and how a tensor is summed up."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whynan.tripwire.checks import (
    flat_ones,
    gradients,
    may_break,
    nonfinite,
    norm_of_gradients,
    optimizer_state,
    total_norm,
)
from whynan.tripwire.values import (
    CLEAN,
    Damage,
    bad_rows,
    damage_of,
    is_mask_like,
    stats,
)

NAN, INF = math.nan, math.inf
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@given(st.lists(st.floats(width=32), max_size=12))
def test_damage_is_what_isfinite_says(values: list[float]) -> None:
    """NaN, +inf and -inf are told apart; beside a NaN the infinities are not told."""
    tensor = torch.tensor(values, dtype=torch.float32)
    damage = damage_of(tensor)
    nan = any(map(math.isnan, values))
    assert damage == Damage(nan, INF in values and not nan, -INF in values and not nan)
    assert bool(damage) == (not bool(torch.isfinite(tensor).all()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_damage_in_every_float(dtype: torch.dtype) -> None:
    """Every floating-point dtype is looked into, also those without arithmetic."""
    tensor = torch.ones(2, 3).to(dtype)
    assert damage_of(tensor) == CLEAN
    bad = torch.tensor([1.0, NAN, 2.0]).to(dtype)
    assert damage_of(bad).nan
    assert stats("x", bad).nan == 1
    assert bad_rows(bad) == [1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((4,), torch.finfo(torch.float32).max),
        torch.full((400,), 65504.0, dtype=torch.float16),
        torch.tensor([3e38, 3e38, -3e38]).to(torch.bfloat16),
        torch.full((4,), 1e308, dtype=torch.float64),
        torch.tensor([1, 2, 3]),
        torch.tensor([True, False]),
        torch.empty(0),
        torch.empty(3, device="meta"),
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
    ids=["float32", "float16", "bfloat16", "float64", "int", "bool", "empty", "meta", "quantised"],
)
def test_finite_is_never_damage(tensor: torch.Tensor) -> None:
    """Huge finite values, whose sum is not finite, and tensors that cannot hold a NaN are clean."""
    assert damage_of(tensor) == CLEAN


@pytest.mark.parametrize(
    ("tensor", "damage"),
    [
        (torch.tensor([INF, -INF]), Damage(posinf=True, neginf=True)),
        (torch.tensor(NAN), Damage(nan=True)),
        (torch.tensor([complex(1, INF)]), Damage(posinf=True)),
        (torch.tensor([complex(NAN, 1)]).conj(), Damage(nan=True)),
        (torch.tensor([[0.0, NAN], [1.0, 0.0]]).to_sparse(), Damage(nan=True)),
        (torch.tensor([[0.0, -INF], [1.0, 0.0]]).to_sparse_csr(), Damage(neginf=True)),
        (torch.nested.nested_tensor([torch.ones(2), torch.tensor([INF])]), Damage(posinf=True)),
        (torch.nested.nested_tensor([torch.ones(2), torch.tensor([INF])], layout=torch.jagged), Damage(posinf=True)),
        (torch.ones(4, 4).index_put((torch.tensor([1]), torch.tensor([2])), torch.tensor(NAN)).t()[2:, :2], Damage(nan=True)),
        (torch.nn.Parameter(torch.tensor([NAN])), Damage(nan=True)),
    ],
    ids=["both", "scalar", "complex", "conjugate", "sparse", "csr", "nested", "jagged", "strided view", "parameter"],
)
def test_damage_in_every_layout(tensor: torch.Tensor, damage: Damage) -> None:
    """Sparse, nested, complex, strided and scalar tensors are looked into."""
    assert damage_of(tensor) == damage


def test_damage_in_a_subclass() -> None:
    """A tensor subclass is looked through without calling its own operations."""

    class Shy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            if getattr(func, "__name__", "") in ("isnan", "sum", "isfinite", "any"):
                raise AssertionError("asked the subclass")
            return super().__torch_function__(func, types, args, kwargs or {})

    assert damage_of(torch.tensor([1.0, NAN]).as_subclass(Shy)).nan


def test_kind_of_damage() -> None:
    """NaN is the worse of the two; damages add up."""
    assert (Damage(posinf=True) | Damage(nan=True)).kind == "nan"
    assert Damage(neginf=True).kind == "inf"
    assert not CLEAN


@given(st.lists(st.floats(width=32), min_size=1, max_size=12))
def test_statistics(values: list[float]) -> None:
    """Counts and range of a tensor are those of its values; the range is over the finite ones."""
    found = stats("x", torch.tensor(values, dtype=torch.float32))
    finite = [v for v in values if math.isfinite(v)]
    assert (found.name, found.dtype, found.shape) == ("x", "float32", (len(values),))
    assert (found.nan, found.posinf, found.neginf) == (sum(map(math.isnan, values)), values.count(INF), values.count(-INF))
    assert found.zeros == values.count(0.0)
    assert (found.min, found.max) == ((min(finite), max(finite)) if finite else (None, None))


@pytest.mark.parametrize(
    ("tensor", "zeros", "low", "high"),
    [
        (torch.tensor([[0, -4], [7, 0]]), 2, -4, 7),
        (torch.tensor([True, False]), 1, 0, 1),
        (torch.tensor([complex(0, 3), complex(-2, 1)]), 1, -2, 3),
        (torch.tensor([[0.0, 5.0], [0.0, 0.0]]).to_sparse(), 0, 5, 5),
        (torch.zeros(0, 3), 0, None, None),
    ],
)
def test_statistics_of_other_kinds(tensor: torch.Tensor, zeros: int, low: float | None, high: float | None) -> None:
    """Integers, booleans, complex, sparse and empty tensors have statistics too, with the shape of the whole."""
    found = stats("x", tensor)
    assert (found.zeros, found.min, found.max, found.shape) == (zeros, low, high, tuple(tensor.shape))


def test_statistics_of_what_cannot_be_read() -> None:
    """A tensor without data still has a name, dtype and shape."""
    found = stats("x", torch.empty(2, 5, device="meta"))
    assert (found.shape, found.dtype, found.nonfinite, found.min) == ((2, 5), "float32", 0, None)


@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, NAN, INF]), min_size=2, max_size=2), max_size=8))
def test_bad_rows(rows: list[list[float]]) -> None:
    """Bad rows are the indices along the first dimension that hold a non-finite value."""
    expected = [i for i, row in enumerate(rows) if not all(map(math.isfinite, row))]
    assert bad_rows(torch.tensor(rows).reshape(len(rows), 2)) == expected


def test_bad_rows_are_limited() -> None:
    """A long list of bad rows is cut; scalars and integers have none."""
    assert bad_rows(torch.full((100,), NAN), limit=5) == [0, 1, 2, 3, 4]
    assert bad_rows(torch.tensor(NAN)) == []
    assert bad_rows(torch.tensor([1, 2])) == []


@pytest.mark.parametrize(
    ("tensor", "mask"),
    [
        (torch.tensor([0.0, -INF, 0.0]), True),
        (torch.full((3, 3), -INF).triu(1), True),
        (torch.full((3,), -INF), True),
        (torch.tensor([0.1, -INF, 0.7]), False),
        (torch.tensor([0.0, INF]), False),
        (torch.tensor([-INF, NAN]), False),
        (torch.zeros(3), False),
    ],
)
def test_masks_are_known_by_their_values(tensor: torch.Tensor, mask: bool) -> None:
    """-inf beside one other value is a mask; scores with -inf, +inf, NaN and plain zeros are not."""
    assert is_mask_like(tensor) is mask


# -- checks -------------------------------------------------------------------------------------------------------


def test_total_norm_is_the_norm_clipping_computes() -> None:
    """The norm over gradients of several dtypes equals that of clip_grad_norm_; without gradients there is none."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(n, 3, dtype=d)) for n, d in ((2, torch.float32), (4, torch.float32), (3, torch.float64))]
    assert total_norm(gradients(parameters)) is None
    for parameter in parameters[1:]:
        parameter.grad = torch.randn_like(parameter)
    norm = total_norm(gradients(parameters))
    assert norm is not None
    torch.testing.assert_close(float(norm), float(torch.nn.utils.clip_grad_norm_(parameters, INF)))


def test_gradients_of_every_layout() -> None:
    """Sparse gradients count with their values."""
    table = torch.nn.Embedding(5, 2, sparse=True)
    (table(torch.tensor([1, 3])).sum() * NAN).backward()
    norm = total_norm(gradients(table.parameters()))
    assert norm is not None
    assert math.isnan(float(norm))


def test_norm_that_overflows_is_not_damage() -> None:
    """Gradients whose norm leaves float32 while every value is finite are not reported, and the norm is what it is."""
    big = torch.full((4,), 3e38)
    assert total_norm([big]) == pytest.approx(6e38)
    assert nonfinite([("big", big)]) == []
    assert [name for name, _, _ in nonfinite([("big", big), ("bad", big * INF)])] == ["bad"]


def test_optimizer_state_has_names() -> None:
    """The tensors of an optimizer's state come with names that a person can read."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight])
    assert list(optimizer_state(optimizer)) == []
    weight.sum().backward()
    optimizer.step()
    names = [name for name, _ in optimizer_state(optimizer)]
    assert any("exp_avg_sq" in name for name in names)


@pytest.mark.parametrize(
    ("make", "risky"),
    [
        (lambda w: torch.optim.SGD([w]), False),
        (lambda w: torch.optim.AdamW([w]), False),
        (lambda w: torch.optim.Adam([w], eps=0.0), True),
        (lambda w: torch.optim.Adam([w.detach().half().requires_grad_()]), True),
        (lambda w: type("Mine", (torch.optim.SGD,), {"__module__": "mine"})([w]), True),
    ],
    ids=["SGD", "AdamW", "no eps", "half weights", "unknown"],
)
def test_optimizers_that_may_break_weights(make: object, risky: bool) -> None:
    """Only optimizers that can make bad weights of good gradients pay for a copy before each step."""
    assert may_break(make(torch.nn.Parameter(torch.ones(2)))) is risky  # type: ignore[operator]


@pytest.mark.parametrize(("size", "kind"), [(1e-24, "dense"), (2e-20, "dense"), (1e23, "dense"), (3.0, "sparse")])
def test_norm_of_gradients_beyond_the_squares_of_float32(size: float, kind: str) -> None:
    """Squares that vanish or overflow are no reason to call a gradient dead or bad; repeated rows of a sparse gradient count once."""
    table = torch.nn.Embedding(4, 3, sparse=kind == "sparse")
    (size * table(torch.tensor([1, 1, 2]))).sum().backward()
    true = table.weight.grad.to_dense().double().norm().item()
    assert norm_of_gradients([table.weight], flat_ones([table.weight])) == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("flat", [[], [True], [True, False, True], [False, False, True, True], [True, True, False, False]])
def test_norm_does_not_depend_on_what_was_known_of_the_parameters(flat: list[bool]) -> None:
    """Shapes that were noted long ago may be those of other parameters: the norm is that of these all the same."""
    held = [torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 4), (5,), (), (2,))]
    for number, parameter in enumerate(held):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    held[3].grad = None
    assert norm_of_gradients(held, flat) == pytest.approx((12 * 1 + 5 * 4 + 9) ** 0.5)
    assert norm_of_gradients(held, flat_ones(held)) == pytest.approx((12 * 1 + 5 * 4 + 9) ** 0.5)
    assert norm_of_gradients(held[3:], flat_ones(held[3:])) is None
    held[1].grad = torch.full((5,), math.nan)
    assert math.isnan(norm_of_gradients(held, flat))  # type: ignore[arg-type]
