"""The parts of the search: what a batch is, how it is changed, how near a hazard is, and how a change is made small."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_models import HAZARDS, HEALTHY
from torch import nn

from whynan.probing.boxes import RADIUS
from whynan.probing.examining import fingerprint
from whynan.probing.hazards import hazards
from whynan.probing.inputs import Role, _widened, observed, rebuild, tensors_in
from whynan.probing.moves import longer, moves
from whynan.probing.searching import Search
from whynan.probing.steps import SubjectStep, attempt, other_weights, step_of, values_of
from whynan.probing.subject import subject_of

# -- what a batch is --------------------------------------------------------------------------------------------


@dataclass
class Batch:
    x: torch.Tensor
    extra: dict[str, Any]


class Holder:
    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.note = x, "kept"


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        (torch.ones(2), ["batch"]),
        ((torch.ones(1), [torch.ones(2), 3]), ["batch[0]", "batch[1][0]"]),
        ({"a": torch.ones(1), "b": {"c": torch.ones(2)}, "n": "text"}, ["batch['a']", "batch['b']['c']"]),
        (Batch(torch.ones(1), {"y": torch.ones(2)}), ["batch.x", "batch.extra['y']"]),
        (Holder(torch.ones(3)), ["batch.x"]),
    ],
)
def test_any_nesting_is_taken_apart_and_put_together_again(tree: Any, names: list[str]) -> None:
    found = list(tensors_in(tree))
    assert [n for n, _ in found] == names
    other = rebuild(tree, iter([t + 1 for _, t in found]))
    assert type(other) is type(tree)
    assert all(torch.equal(new, old + 1) for (_, new), (_, old) in zip(tensors_in(other), found, strict=True))
    assert all(torch.equal(t, torch.ones_like(t)) for _, t in tensors_in(tree))


@given(st.floats(-1e6, 1e6), st.floats(0, 1e6))
def test_a_widened_range_holds_the_observed_one_and_keeps_its_sign(low: float, span: float) -> None:
    high = low + span
    floor, ceiling = _widened(low, high)
    assert floor <= low
    assert high <= ceiling
    assert low < 0 or floor >= 0
    assert high > 0 or ceiling <= 0


@pytest.mark.parametrize(
    ("name", "value", "role"),
    [
        ("x", torch.randn(3), Role.FLOATS),
        ("x", torch.tensor([True, False]), Role.MASK),
        ("attention_mask", torch.tensor([1, 0, 1]), Role.MASK),
        ("mask", torch.tensor([0.0, 1.0]), Role.MASK),
        ("bias", torch.tensor([0.0, -math.inf]), Role.MASK),
        ("lengths", torch.tensor([3, 2]), Role.LENGTHS),
        ("y", torch.tensor([3, 2]), Role.INTEGERS),
        ("z", torch.ones(2, dtype=torch.complex64), Role.OTHER),
        ("empty", torch.ones(0), Role.OTHER),
    ],
)
def test_the_role_of_a_tensor_by_its_values_and_name(name: str, value: torch.Tensor, role: Role) -> None:
    assert observed(name, value).role is role


def _step(model: nn.Module | None, loss_fn: Any, batch: Any, **more: Any) -> SubjectStep:
    return step_of(subject_of({"model": model, "loss_fn": loss_fn, "batch": batch, **more}))


def test_ids_are_known_by_the_embedding_they_reach_and_labels_by_their_loss() -> None:
    model = nn.Sequential(nn.Embedding(50, 4, padding_idx=7), nn.Linear(4, 9))
    batch = (torch.randint(3, 10, (2, 5)), torch.randint(0, 3, (2, 5)))
    ids, labels = _step(model, lambda out, b: F.cross_entropy(out.flatten(0, 1), b[1].flatten()), batch).inputs
    assert (ids.role, ids.low, ids.high, ids.padding) == (Role.IDS, 0, 49, 7)
    assert (labels.role, labels.low, labels.high, labels.ignore) == (Role.LABELS, 0, 8, None)


def test_the_ignored_label_counts_only_where_the_batch_uses_it_or_it_is_stated() -> None:
    model, y = nn.Linear(2, 3), torch.tensor([0, -100, 2])

    def loss_fn(out: torch.Tensor, batch: Any) -> torch.Tensor:
        return F.cross_entropy(out, batch[1])

    assert _step(model, loss_fn, (torch.randn(3, 2), y)).inputs[1].ignore == -100
    assert _step(model, loss_fn, (torch.randn(3, 2), y.abs().clamp(max=2))).inputs[1].ignore is None
    assert _step(model, loss_fn, (torch.randn(3, 2), y.clamp(0, 2)), ignore_index=-100).inputs[1].ignore == -100


def test_a_stated_vocabulary_and_padding_are_taken_for_ids() -> None:
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 9))
    step = _step(model, lambda out, b: out.square().mean(), torch.randint(3, 10, (2, 5)), vocabulary=20, padding=2)
    assert (step.inputs[0].high, step.inputs[0].padding) == (19, 2)
    assert "only padding in batch" in {m.name for m in moves(step.inputs) if m.inside}


def test_masks_and_lengths_are_known_by_their_use() -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, keep, lengths = batch
        packed = nn.utils.rnn.pack_padded_sequence(model(x), lengths, batch_first=True)
        return packed.data.masked_fill(keep > 0.5, 0.0).square().mean()

    batch = (torch.randn(3, 4, 2), torch.tensor([0.0, 1.0]), torch.tensor([4, 3, 2]))
    roles = [i.role for i in _step(nn.Linear(2, 2), loss_fn, batch).inputs]
    assert roles == [Role.FLOATS, Role.FLOATS, Role.LENGTHS]

    def straight(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0]).masked_fill(batch[1].bool(), 0.0).square().mean() + F.scaled_dot_product_attention(*[batch[0]] * 3, batch[2]).mean()

    batch = (torch.randn(3, 4, 2), torch.randint(0, 2, (3, 4, 2)), torch.tensor([[0.0, -5.0] * 2] * 4))
    assert _step(nn.Linear(2, 2), straight, batch).inputs[2].role is Role.MASK


def test_stated_bounds_by_name_by_number_and_for_all() -> None:
    x, y = torch.rand(4, 2), torch.rand(4)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch["x"]).squeeze(-1) - batch["y"]).square().mean()

    by_name = _step(nn.Linear(2, 1), loss_fn, {"x": x, "y": y}, bounds={"x": (-1, 3)}).inputs
    assert (by_name[0].low, by_name[0].high, by_name[0].stated) == (-1, 3, True)
    assert not by_name[1].stated
    assert _step(nn.Linear(2, 1), loss_fn, {"x": x, "y": y}, bounds=[None, (0, 9)]).inputs[1].high == 9
    assert all(i.low == -5 for i in _step(nn.Linear(2, 1), loss_fn, {"x": x, "y": y}, bounds=(-5, 5)).inputs)


# -- changes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factory", HEALTHY, ids=lambda f: f.__name__)
def test_every_change_is_a_change_and_those_said_to_be_inside_are(factory: Any) -> None:
    step = step_of(subject_of(factory()))
    sample = [v.clone() for v in values_of(step)]
    names = []
    for move in moves(step.inputs):
        names.append(move.name)
        assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(move.values, sample, strict=True)), move.name
        if move.inside:
            assert all(i.holds(v) for i, v in zip(step.inputs, move.values, strict=True)), move.name
        assert all(v.dtype is s.dtype for v, s in zip(move.values, sample, strict=True))
    assert len(names) > 5
    assert all(torch.equal(v, s) for v, s in zip(values_of(step), sample, strict=True))


def test_the_edge_cases_of_the_issue_are_among_the_changes() -> None:
    ids = torch.randint(1, 9, (4, 5))
    labels = ids.clone()
    labels[0, 0] = -100
    model = nn.Sequential(nn.Embedding(12, 4, padding_idx=0), nn.Linear(4, 12))
    step = _step(model, lambda out, b: F.cross_entropy(out.flatten(0, 1), b[1].flatten()), (ids, labels))
    names = {m.name for m in moves(step.inputs) if m.inside}
    for wanted in (
        "identical rows", "batch of one", "length-1 sequences", "sequences four times as long", "only padding in batch[0]", "a row of padding in batch[0]",
        "only the ignored label in batch[1]", "a row of the ignored label in batch[1]", "only the smallest in batch[0]", "only the largest in batch[0]",
    ):  # fmt: skip
        assert wanted in names, wanted
    floats = {m.name for m in moves([observed("x", torch.randn(4, 3))])}
    assert {"zeros in x", "a constant in x", "denormal values in x", "tiny values in x", "a row of zeros in x"} <= floats


def test_longer_sequences_are_outside() -> None:
    found = list(longer([observed("x", torch.randn(4, 3)), observed("y", torch.randn(4))]))
    assert found
    assert all(not m.inside and m.reshapes for m in found)


# -- hazards ----------------------------------------------------------------------------------------------------


def _nearest(loss: torch.Tensor, operation: str) -> float:
    return min(h.value() for h in hazards(loss) if h.operation == operation)


@pytest.mark.parametrize(
    ("function", "operation", "far", "near"),
    [
        (torch.log, "Log", 2.0, 1e-6),
        (torch.sqrt, "Sqrt", 2.0, 1e-6),
        (torch.rsqrt, "Rsqrt", 2.0, 1e-6),
        (torch.reciprocal, "Reciprocal", 2.0, 1e-6),
        (lambda x: 1 / x, "Reciprocal", 2.0, 1e-6),
        (lambda x: x / (3 * x), "Div", 2.0, 1e-6),
        (lambda x: x**-0.5, "Pow", 2.0, 1e-6),
        (torch.exp, "Exp", 2.0, 80.0),
        (torch.acos, "Acos", 0.1, 0.999),
        (torch.atanh, "Atanh", 0.1, 0.999),
        (torch.acosh, "Acosh", 3.0, 1.001),
        (torch.log1p, "Log1P", 0.5, -0.999),
        (lambda x: x.expand(3).norm(), "LinalgVectorNorm", 2.0, 1e-6),
        (lambda x: torch.stack([x, x * 1.5 + 1e-3]).std(), "Std", 2.0, 1e-3),
        (lambda x: torch.stack([x, x * 0]).softmax(0), "Softmax", 0.5, 60.0),
        (torch.sigmoid, "Sigmoid", 0.5, 60.0),
        (lambda x: torch.linalg.inv(torch.stack([x, x * 0 + 1, x * 0 + 1, x]).reshape(2, 2)), "LinalgInvEx", 3.0, 1.0001),
    ],
)
def test_a_hazard_is_nearer_where_its_operation_is(function: Any, operation: str, far: float, near: float) -> None:
    distances = []
    for value in (far, near):
        x = torch.tensor(value, requires_grad=True)
        distances.append(_nearest(function(x).sum(), operation))
    assert distances[1] < distances[0]


@pytest.mark.parametrize("function", [torch.log, torch.sqrt, torch.exp, torch.acos, lambda x: x / (x * x), lambda x: x.norm(), lambda x: x.softmax(0)])
def test_the_distance_can_be_followed_back_to_the_input(function: Any) -> None:
    x = torch.tensor([0.3, 0.6], requires_grad=True)
    found = [h for h in hazards(function(x).sum()) if h.aim.requires_grad]
    assert found
    slope = torch.autograd.grad(found[0].nearest(), x, retain_graph=True)[0]
    assert torch.isfinite(slope).all()
    assert bool((slope != 0).any())


def test_a_loss_without_graph_has_no_hazards() -> None:
    assert hazards(torch.ones(())) == []


# -- search -----------------------------------------------------------------------------------------------------


def test_the_gradient_leads_to_a_failure_that_no_simple_change_meets() -> None:
    """log(w·x + 2) fails only where one direction is pushed far enough, and inside the stated range."""

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        direction = torch.tensor([1.0, -2.0, 0.5, 1.5])
        return torch.log((x * direction).sum(-1) + 3.0).mean()

    torch.manual_seed(0)
    step = _step(None, loss_fn, 0.1 * torch.rand(5, 4), bounds={"0": (-0.7, 0.7)})
    search = Search(step, 5.0)
    assert search._by_moves() is None
    found = search.run()
    assert found is not None
    assert found.kind == "inputs"
    assert found.how in ("Log", "Mul")
    assert step.inputs[0].holds(found.values[0])
    assert attempt(step, found.values).broken


def test_an_exact_zero_is_hit_by_a_newton_step() -> None:
    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return (1.0 / (x[:, 0] - 0.5)).square().mean()

    found = Search(_step(None, loss_fn, torch.tensor([[0.25, 1.0], [0.9, 0.3]])), 5.0).run()
    assert found is not None
    assert found.kind == "inputs"


def test_the_change_is_made_small() -> None:
    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        return torch.log(x[2] + 1).sum() + x.square().mean()

    torch.manual_seed(0)
    step = _step(None, loss_fn, torch.rand(6, 3), bounds={"0": (-4.0, 4.0)})
    found = Search(step, 5.0).run()
    assert found is not None
    moved = (found.values[0] != step.inputs[0].value).any(1)
    assert moved.tolist() == [False, False, True, False, False, False]
    assert float((found.values[0] - step.inputs[0].value).abs().max()) < 2.5


def test_weights_stay_within_their_radius() -> None:
    class Edge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1.0, 0.4]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sqrt(self.scale) * x

    step = _step(Edge(), lambda out, b: out.sum(), torch.ones(3, 2))
    found = Search(step, 5.0).run()
    assert found is not None
    assert found.kind == "weights"
    assert found.weights is not None
    assert float((found.weights[0] - step.weights[0][1]).abs().max()) <= RADIUS + 1e-6
    assert torch.equal(step.weights[0][1].detach(), torch.tensor([1.0, 0.4]))


def test_a_search_without_time_tries_nothing() -> None:
    step = step_of(subject_of(HAZARDS["unexplained_variance"]()))
    search = Search(step, 0.0)
    assert search.run() is None
    assert search.attempts == 0
    assert Search(step, 3.0).run() is not None


def test_a_failure_that_is_known_is_passed_over() -> None:
    step = step_of(subject_of(HAZARDS["unexplained_variance"]()))
    first = Search(step, 3.0).run()
    assert first is not None
    mark = fingerprint(step, first.values)
    again = Search(step, 1.0, known=lambda values, weights: fingerprint(step, values) == mark).run()
    assert again is None or fingerprint(step, again.values) != mark


def test_other_weights_are_put_back_also_after_an_error() -> None:
    step = _step(nn.Linear(2, 1), lambda out, b: out.sum(), torch.ones(2, 2))
    weight = step.weights[0][1]
    before, weight.grad = weight.detach().clone(), torch.ones_like(weight)
    with pytest.raises(ZeroDivisionError), other_weights(step, [torch.zeros_like(w) for _, w in step.weights]):
        assert not weight.any()
        raise ZeroDivisionError
    assert torch.equal(weight, before)
    assert torch.equal(weight.grad, torch.ones_like(weight))


@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 100))
def test_a_step_gives_the_same_loss_each_time(rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(columns, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    step = _step(model, lambda out, b: out.square().mean(), torch.randn(rows, columns))
    first, second = attempt(step, values_of(step)), attempt(step, values_of(step))
    assert first.loss == second.loss
    assert first.fine
