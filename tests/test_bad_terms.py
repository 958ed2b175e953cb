"""`bad_terms="drop"`: a step goes on without the bad terms of its loss, bit for bit as if they had not been added."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import whynan
from whynan.errors import UsageError


class Heads(nn.Module):
    """Four heads over one trunk; the loss is the sum of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.3)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(4))

    def forward(self, x: torch.Tensor, spread: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        """Sum over the heads that are used."""
        total = torch.zeros(())
        hidden = self.drop(torch.tanh(self.trunk(x)))
        for index in used:
            value = (self.heads[index](hidden) / spread[index]).square().mean()
            total = total + value / 4
        return total


EVERY, GOOD = (0, 1, 2, 3), (0, 2)


def train(used: dict[int, tuple[int, ...]], micro: int = 1, clip: bool = False, **options: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Train eight steps; in step 4 heads 1 and 3 divide by zero. Return the incidents and the whole state."""
    torch.manual_seed(0)
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with whynan.watch(model, optimizer, files=False, **options) as guard:
        for step in range(8):
            optimizer.zero_grad()
            for part in range(micro):
                spread = torch.ones(4)
                if step == 4 and part == 0:
                    spread[1] = spread[3] = 0
                model(torch.rand(8, 4), spread, used.get(step, EVERY) if part == 0 else EVERY).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    state = torch.utils._pytree.tree_leaves([model.state_dict(), optimizer.state_dict()])
    return guard.incidents, [value for value in state if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("clip", [False, True])
def test_the_state_is_that_of_a_run_that_never_added_the_bad_terms(micro: int, clip: bool) -> None:
    """Weights, moments and step counts; also with accumulated gradients and clipping."""
    incidents, dropped = train({}, micro, clip, bad_terms="drop")
    none, wanted = train({4: GOOD}, micro, clip)
    assert [i.action.taken for i in incidents] == ["terms dropped"] and none == []
    assert len(dropped) == len(wanted) and all(map(torch.equal, dropped, wanted))


def test_heads_that_failed_keep_weights_and_moments() -> None:
    """A head that only a bad term reaches has made one update less."""
    incidents, state = train({}, bad_terms="drop")
    steps = sorted(int(value) for value in state if value.dim() == 0)
    assert steps == [7] * 4 + [8] * 6
    assert [t.nonfinite for t in incidents[0].terms] == [0, 1, 0, 1]


def test_by_default_the_step_is_skipped() -> None:
    """Dropping terms changes results and is asked for."""
    incidents, _ = train({})
    assert [i.action.taken for i in incidents] == ["skipped"]


def test_a_loss_with_no_good_term_is_skipped() -> None:
    """Nothing is left to learn from."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with whynan.watch(model, optimizer, files=False, bad_terms="drop") as guard:
        for step in range(4):
            y = model(torch.rand(8, 4)) / (step != 2)
            a, b = y[:, 0].square().mean(), y[:, 1].square().mean()
            optimizer.zero_grad()
            (a + b).backward()
            optimizer.step()
    assert [i.action.taken for i in guard.incidents] == ["skipped"]


# -- finite terms with a bad gradient -------------------------------------------------------------------------------

Form = Callable[[list[torch.Tensor], torch.Tensor], torch.Tensor]


def in_a_loop(values: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """`total = total + w * value`."""
    total = torch.zeros((), requires_grad=True)
    for value, weight in zip(values, weights, strict=True):
        total = total + weight * value / 4
    return total


def in_place(values: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """`total += value`."""
    total = torch.zeros(())
    for value in values:
        total += value
    return total


def nested(values: list[torch.Tensor], weights: torch.Tensor) -> torch.Tensor:
    """Sums in sums, with signs and factors between them."""
    return ((values[0] + 0.5 * values[1]) - (-values[2] - values[3]) / 3) * 2 + 1


FORMS: dict[str, Form] = {
    "loop": in_a_loop,
    "in place": in_place,
    "nested": nested,
    "sum": lambda values, weights: sum(values, torch.zeros(())) / 4,
    "stack": lambda values, weights: torch.stack(values).mean(),
    "weighted stack": lambda values, weights: (torch.stack(values) * weights).sum(),
    "dot": lambda values, weights: torch.stack(values) @ weights,
    "cat": lambda values, weights: torch.cat([value.reshape(1) for value in values]).sum(),
}


class Slopes(nn.Module):
    """Four heads over one trunk, each a root; one that is left out of the loss counts as a fixed 0 there."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.trunk = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(4))

    def forward(self, x: torch.Tensor, spread: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        """Join the roots as asked."""
        hidden = self.drop(torch.tanh(self.norm(self.trunk(x))))
        values = [(head(hidden) * spread[n]).square().sum().sqrt() for n, head in enumerate(self.heads)]
        return self.form([v if n in used else torch.zeros(()) for n, v in enumerate(values)], torch.tensor([0.5, 2.0, 1.0, 3.0]))


def slopes(form: str, used: tuple[int, ...], bad: tuple[int, ...], micro: int = 1, clip: bool = False, fresh: Any = None, **options: Any) -> tuple[Any, Any]:
    """Train six steps; in step 3 some heads take the root of 0. Return the incidents and the whole state."""
    torch.manual_seed(0)
    model = Slopes(FORMS[form])
    optimizer = (fresh or (lambda weights: torch.optim.AdamW(weights, 1e-2)))(model.parameters())
    with whynan.watch(model, optimizer, files=False, **options) as guard:
        for step in range(6):
            optimizer.zero_grad()
            for part in range(micro):
                spread = torch.ones(4)
                hit = step == 3 and part == 0
                spread[list(bad) if hit else []] = 0
                model(torch.rand(8, 4), spread, used if hit else EVERY).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    state = torch.utils._pytree.tree_leaves([model.state_dict(), optimizer.state_dict()])
    return guard.incidents, [value for value in state if isinstance(value, torch.Tensor)]


def held_against_good_terms_only(form: str, bad: tuple[int, ...], *more: Any, **options: Any) -> Any:
    """Assert that a run with bad heads ends bit for bit as one without them; return its incident."""
    good = tuple(n for n in EVERY if n not in bad)
    incidents, dropped = slopes(form, EVERY, bad, *more, **options, bad_terms="drop")
    none, wanted = slopes(form, good, bad, *more, **options)
    assert [i.action.taken for i in incidents] == ["terms dropped"] and none == []
    assert incidents[0].symptom.place == "gradient" and not any(term.nonfinite for term in incidents[0].terms)
    assert len(dropped) == len(wanted) and all(map(torch.equal, dropped, wanted))
    return incidents[0]


@pytest.mark.parametrize("form", FORMS)
def test_behind_a_finite_loss_terms_with_a_bad_gradient_are_left_out(form: str) -> None:
    """However the loss is added up: weights, moments, step counts and running statistics; the trunk learns from the good heads."""
    held_against_good_terms_only(form, (1, 3))


@pytest.mark.parametrize("bad", [(0,), (3,), (0, 1, 2)])
def test_any_of_the_terms_may_be_bad(bad: tuple[int, ...]) -> None:
    """Also the first, which the sum begins with, and all but one."""
    held_against_good_terms_only("loop", bad)


def test_with_accumulation_and_clipping_too() -> None:
    """Only the micro-batch with the bad heads loses terms; the norm is that of what is left."""
    held_against_good_terms_only("stack", (1, 3), 3, True)


def test_momentum_of_a_head_that_failed_stays() -> None:
    """Another optimizer, with state that a gradient of 0 would move."""
    held_against_good_terms_only("sum", (2,), fresh=lambda weights: torch.optim.SGD(weights, 0.01, momentum=0.9, weight_decay=0.1))


@settings(max_examples=8)
@given(st.sampled_from(sorted(FORMS)), st.sets(st.sampled_from(EVERY), min_size=1, max_size=3), st.integers(1, 2), st.booleans())
def test_the_state_is_always_that_of_the_good_terms(form: str, bad: set[int], micro: int, clip: bool) -> None:
    """Any form, any heads, with and without accumulation and clipping."""
    held_against_good_terms_only(form, tuple(sorted(bad)), micro, clip)


def test_the_incident_names_the_terms_and_their_line() -> None:
    """As the source does, and why."""
    incident = held_against_good_terms_only("loop", (1, 3))
    line = in_a_loop.__code__.co_firstlineno + 4
    assert (
        f"left out of the loss: value[1], value[3] (tests/test_bad_terms.py:{line}); alone, each has a gradient that is not finite" in incident.cause.evidence
    )


def test_a_term_with_a_name_is_left_out_as_a_whole() -> None:
    """What the incident calls a term is what goes: a head of two parts does not stay by half."""

    def make(model: nn.Module, x: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for head in range(2):
            value = root(model(x)[:, head] * spread[0] ** head) + model(x)[:, head].square().sum()
            total = total + value
        return total

    incidents: list[Any] = []
    assert taken(make, incidents) == ["terms dropped"]
    assert any(text.startswith("left out of the loss: value[1] (") for text in incidents[0].cause.evidence)


def test_members_of_a_list_are_named_by_it() -> None:
    """`torch.stack(values)` and `sum(values)`."""
    words = [held_against_good_terms_only(form, (1,)).cause.evidence[-1] for form in ("stack", "sum")]
    assert all(text.startswith("left out of the loss: values[1] (") for text in words)


def test_bad_values_in_a_stack_are_left_out() -> None:
    """A loss that is itself not finite may be joined as well as added up."""

    def make(model: nn.Module, x: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
        return torch.stack([model(x).square().mean(), (model(x) / spread[0]).square().mean()]).mean()

    assert taken(make) == ["terms dropped"]


def taken(make: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor], incidents: list[Any] | None = None) -> list[str]:
    """Train four steps, in one of which the spread is 0, and return what was done; the weights must stay finite."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with whynan.watch(model, optimizer, files=False, bad_terms="drop") as guard:
        for step in range(4):
            loss = make(model, torch.rand(8, 4), torch.full((2,), float(step != 2)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    if incidents is not None:
        incidents += guard.incidents
    return [i.action.taken for i in guard.incidents]


def root(values: torch.Tensor) -> torch.Tensor:
    """Its slope at 0 is infinite."""
    return values.square().sum().sqrt()


@pytest.mark.parametrize(
    "make",
    [
        lambda model, x, spread: root(model(x) * spread),
        lambda model, x, spread: root(model(x)[:, 0] * spread[0]) + root(model(x)[:, 1] * spread[1]),
        lambda model, x, spread: (model(x) * spread).square().sum(0).sqrt().mean() + 0,
        lambda model, x, spread: (root(model(x)[:, 0]) + root(model(x)[:, 1] * spread[1])).tanh(),
        lambda model, x, spread: sum(root(model(x)[:, n % 2] * (spread[1] if n == 2 else 1)) for n in range(40)),
    ],
    ids=["no sum", "all terms", "elements of one tensor", "a function of the sum", "too many terms"],
)
def test_what_cannot_be_taken_apart_is_skipped(make: Any) -> None:
    """Nothing is guessed."""
    assert taken(make) == ["skipped"]


def test_gradients_of_earlier_steps_are_not_lost() -> None:
    """A program that zeroes every other step: the replay has not what is left of the step before, and the step is skipped."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    other = nn.Parameter(torch.ones(()))
    optimizer.add_param_group({"params": [other]})
    with whynan.watch(model, optimizer, files=False, bad_terms="drop") as guard:
        for step in range(6):
            if step % 2 == 0:
                optimizer.zero_grad()
            y = model(torch.rand(8, 4))
            (other.square() + y.square().mean() + root(y * (step != 3))).backward()
            optimizer.step()
    assert [i.action.taken for i in guard.incidents] == ["skipped"]


@pytest.mark.parametrize("fresh", [torch.optim.LBFGS, torch.optim.AdamW])
def test_closures_are_skipped(fresh: Any) -> None:
    """LBFGS would compare the loss with the bad terms and gradients without them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = fresh(model.parameters(), 0.1)
    with whynan.watch(model, optimizer, files=False, bad_terms="drop") as guard:
        for step in range(4):
            x = torch.rand(8, 4)

            def closure(x: torch.Tensor = x, alive: bool = step != 2) -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(x).square().mean() + root(model(x) * alive)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert [i.action.taken for i in guard.incidents] == ["skipped"]


def test_gradients_clipped_by_value_stay_clipped() -> None:
    """Also where the program looks at the gradient of a head that has none then: it is not moved by one of 0."""
    state = []
    for alive in (0.0, None):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        with whynan.watch(model, optimizer, files=False, bad_terms="drop") as guard:
            for step in range(4):
                x = torch.rand(8, 4)
                optimizer.zero_grad()
                good = model[0](x).square().mean()
                other = root(model[1](x) * (alive if step == 2 and alive is not None else 1))
                (good if step == 2 and alive is None else good + other).backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
        state.append([p.clone() for p in model.parameters()])
        assert [i.action.taken for i in guard.incidents] == ["terms dropped"] * (alive is not None)
    assert all(map(torch.equal, *state))


def test_an_optimizer_inside_the_backward_pass_is_skipped() -> None:
    """Its steps are over when the terms are known."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    each: dict[torch.Tensor, torch.optim.SGD] = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(parameter: torch.Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    with whynan.watch(model, *each.values(), files=False, bad_terms="drop") as guard:
        for step in range(4):
            y = model(torch.rand(8, 4))
            (y.square().mean() + root(y * (step != 2))).backward()
    assert "terms dropped" not in [i.action.taken for i in guard.incidents] and guard.incidents
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_updates_by_hand_are_left_out_whole() -> None:
    """Where there is no optimizer the step is what the program writes."""
    torch.manual_seed(0)
    weight = torch.ones(4, requires_grad=True)
    with whynan.watch(files=False, bad_terms="drop") as guard:
        for step in range(4):
            (weight.square().sum() + root(weight * (step != 2))).backward()
            assert weight.grad is not None
            with torch.no_grad():
                weight -= 0.1 * weight.grad
            weight.grad = None
    assert [i.action.taken for i in guard.incidents] == ["skipped"] and bool(weight.isfinite().all())


def test_another_word_is_refused() -> None:
    """With what it may be."""
    with pytest.raises(UsageError, match="bad_terms is skip or drop, not 'keep'"):
        whynan.watch(nn.Linear(1, 1), bad_terms="keep")
