"""What an incident says beside its place: the terms of the loss by name, and the values of the module side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import whynan
from whynan.records import Incident, TensorStats
from whynan.report import markdown
from whynan.report.hiding import Contents
from whynan.report.reading import incident_of, read_run


def broken(make: Callable[[nn.Module, torch.Tensor], torch.Tensor], model: nn.Module | None = None, folder: Any = None, at: int = 4) -> Incident:
    """Train a few steps; in one of them a row of the batch is all zeros. Return the incident."""
    torch.manual_seed(0)
    model = model or nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with whynan.watch(model, optimizer, **({"files": False} if folder is None else {"run_dir": folder})) as guard:
        for step in range(6):
            x = torch.rand(8, 4) + 0.1
            x[2] *= step != at
            loss = make(model, x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return guard.incidents[0]


def terms(incident: Incident) -> dict[str, str]:
    """Name and value of each term."""
    return {t.name: t.line() for t in incident.terms}


def note(incident: Incident) -> str:
    """The sentence about the terms."""
    return next((e for e in incident.cause.evidence if e.startswith("terms of the loss")), "")


def test_terms_are_named_by_their_variables_with_the_bad_one() -> None:
    """Weights from a dictionary, a term with a factor of its own: names and values are those of the variables."""
    weights = {"text": 0.5, "latent": 2.0}

    def make(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        text_loss = model(x).square().mean()
        latent_loss = (model(x).square().sum(1) / x.norm(dim=1)).mean()
        decay = 1e-4 * sum(p.square().sum() for p in model.parameters())
        return weights["text"] * text_loss + weights["latent"] * latent_loss + decay

    incident = broken(make)
    assert list(terms(incident)) == ["text_loss", "latent_loss", "decay"]
    assert incident.terms[1].posinf == 1 and not incident.terms[0].nonfinite
    assert 0 < (incident.terms[2].max or 0) < 1e-3
    assert "latent_loss inf" in note(incident) and note(incident).endswith("born on the way to latent_loss")


def test_terms_of_a_loop_are_numbered() -> None:
    """A total that goes on under its own name is taken apart."""

    def make(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for column in range(4):
            value = (model(x)[:, column].square() / x[:, column]).mean() if column == 2 else model(x)[:, column].square().mean()
            total = total + value / 4
        return total

    incident = broken(make)
    assert list(terms(incident)) == ["value[0]", "value[1]", "value[2]", "value[3]"]
    assert [t.nonfinite for t in incident.terms] == [0, 0, 1, 0]


def weighted_mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Divide by what may be 0."""
    return (values * weights).sum() / weights.sum()


def test_a_term_that_is_bad_by_its_divisor_is_named_as_a_whole() -> None:
    """What a function divides by is not a term, and has no part in the name of one."""

    def make(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out, mask = model(x), (x[2:3] > 0).float().expand_as(x)
        return weighted_mean(out, mask) + 0.1 * out.square().mean()

    incident = broken(make)
    assert list(terms(incident)) == ["weighted_mean(out, mask)", "out.square().mean()"]
    assert [bool(t.nonfinite) for t in incident.terms] == [True, False]


def test_terms_that_one_operation_made_are_not_told_with_the_value_of_the_first() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor([0.25, 0.5]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

    def make(model: Any, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        first, second = model.scale.unbind()
        return first + second + out.square().mean() + (out.square().sum(1) / x.norm(dim=1)).mean()

    incident = broken(make, Weighted())
    assert "first" not in terms(incident) and "second" not in terms(incident)
    assert sum(bool(t.nonfinite) for t in incident.terms) == 1


BETA = 0.5


def both_given(fit: torch.Tensor, penalty: torch.Tensor, scale: float) -> torch.Tensor:
    """Nothing here says which of two arguments is the weight."""
    return scale * fit + penalty


def one_computed(out: torch.Tensor, x: torch.Tensor, weight: float) -> torch.Tensor:
    """What is computed here is the term."""
    fit, ratio = out.square().mean(), (out.square().sum(1) / x.norm(dim=1)).mean()
    return weight * fit + weight * out.abs().mean() + BETA * ratio


def test_a_term_is_never_named_by_its_weight() -> None:
    """`beta * x` and `x * beta` arrive alike: where the source does not tell them apart, the product is told as it stands."""
    incident = broken(lambda model, x: one_computed(model(x), x, 0.1))
    assert list(terms(incident)) == ["fit", "out.abs().mean()", "ratio"]
    incident = broken(lambda model, x: both_given(model(x).square().mean(), (model(x).square().sum(1) / x.norm(dim=1)).mean(), 4.0))
    assert list(terms(incident)) == ["scale * fit", "penalty"]
    fit = incident.terms[0].max or 0
    assert 0.4 < fit < 8  # of the product: four times a mean of squares


def test_a_bad_gradient_is_tied_to_its_term() -> None:
    """All terms are finite; the slope at fault lies on the way to one of them."""

    def make(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        length = (model(x) * x).square().sum(1).sqrt().mean()
        loss += length
        return loss

    incident = broken(make)
    assert incident.cause.code == "WN501"
    assert list(terms(incident)) == ["loss", "length"]
    assert note(incident).endswith("born on the way to length")


def test_a_loss_that_is_no_sum_has_no_terms() -> None:
    """One mean is not taken apart."""
    incident = broken(lambda model, x: (model(x).sum(1) / x.norm(dim=1)).square().mean())
    assert incident.terms == () and note(incident) == ""


class Gated(nn.Module):
    """A block with named points inside and a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.alpha = nn.Parameter(torch.tensor([0.1, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Divide by the size of the input, in a helper."""
        read = self.alpha[0] * x
        sized = scaled(read, x)
        final = self.inner(sized)
        return final * self.alpha[1]


def scaled(values: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The place of birth."""
    size = by.norm(dim=1, keepdim=True)
    return values / size


def test_named_values_of_the_module_stand_side_by_side(tmp_path: Any) -> None:
    """Variables before and after the birth, the small weight, and those of the helper; in the report and not without values."""
    incident = broken(lambda model, x: model(x).square().mean(), Gated(), tmp_path)
    rows = {value.name: value for value in incident.inside}
    assert list(rows) == ["x", "read", "sized", "final", "self.alpha", "scaled: values", "scaled: by", "scaled: size"]
    assert rows["sized"].nan == 4 and rows["read"].nan == 0 and rows["final"].nan == 4
    assert rows["self.alpha"].shape == (2,) and rows["scaled: size"].zeros == 1
    text = markdown.render(read_run(tmp_path))
    assert "Values inside" in text and "| sized | f32[8, 4] | 4 | 0 |" in text
    assert "Values inside" not in markdown.render(read_run(tmp_path), Contents(values=False))
    assert "| sized |" not in markdown.render(read_run(tmp_path), Contents(source=False))


def test_terms_and_values_are_read_back_from_json() -> None:
    """What is written to incidents.jsonl is what a report gets."""

    def make(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() + (x.sum() * 0 + model(x).sum() / x.norm(dim=1)).mean()

    incident = broken(make, Gated())
    again = incident_of(incident.to_json())
    assert (again.terms, again.inside) == (incident.terms, incident.inside)


def test_the_step_a_run_was_stopped_in_is_counted(capfd: Any) -> None:
    """Steps 0 to 4 were begun: five, not four."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        with whynan.watch(model, optimizer, files=False, policy="skip:1") as guard:
            for step in range(9):
                loss = model(torch.rand(4, 2)).sum() / (step < 3)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    except whynan.TrainingStopped:
        pass
    assert guard.incidents[-1].action.taken == "stopped"
    assert "2 incidents in 5 steps, at 3, 4" in capfd.readouterr().err


class Heads(nn.Module):
    """Eight heads over one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One column a head, without the trunk's gradient."""
        return torch.cat([head(self.trunk(x).detach()) for head in self.heads], 1)


def test_heads_with_a_bad_gradient_are_named_and_counted() -> None:
    """Two of eight heads meet an infinite slope: both are named, in the symptom and in a note."""

    def make(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        weights = torch.ones(8)
        weights[[2, 5]] = float(x[2].sum() > 0)
        return (out * weights).square().sum(0).add(1e-30).sqrt().sum() if x[2].sum() > 0 else (out * weights).square().sum(0).sqrt().sum()

    incident = broken(make, Heads())
    assert incident.symptom.detail == "4 tensors: heads.2, heads.5 (2 of 8)"
    assert "not finite: the gradients of heads.2, heads.5 (2 of 8)" in incident.cause.evidence


def test_what_all_batches_have_is_no_condition(capfd: Any) -> None:
    """A mask of ones in every batch says nothing of the bad one."""
    torch.manual_seed(0)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.words(ids) * mask[:, None]

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False):
        for step in range(7):
            ids, mask = torch.randint(0, 9, (12,)) if step != 3 else torch.full((12,), 5), torch.ones(12, dtype=torch.long)
            y = model(ids, mask)
            optimizer.zero_grad()
            (y.square().sum() / (y - y[0]).square().sum()).backward()
            optimizer.step()
    said = capfd.readouterr().err
    assert "ids of Masked held one value only in 1 of 6 batches" in said and "mask of Masked" not in said


@pytest.mark.parametrize(
    ("bad", "text"), [(3, "in 1 of 6 batches since step 1"), (20, "in 1 of 5 batches since step 20, and in 0 of 2 in steps 7, 8 before it")]
)
def test_a_condition_is_counted_in_the_steps_before_it_too(bad: int, text: str, capfd: Any) -> None:
    """The kept healthy steps are looked through: joined to the incident, or told beside it."""
    torch.manual_seed(0)
    model = nn.Embedding(9, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with whynan.watch(model, optimizer, files=False):
        for step in range(bad + (4 if bad == 3 else 5)):
            ids = torch.randint(0, 9, (12,)) if step != bad else torch.full((12,), 5)
            y = model(ids)
            loss = y.square().sum() / (y - y.mean(0)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert f"input of Embedding held one value only {text}" in capfd.readouterr().err


def test_a_quotient_by_something_computed_is_a_term_itself() -> None:
    """Its numerator is no part of the loss: the terms add up to it, also where the sum begins with a number."""
    torch.manual_seed(0)
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with whynan.watch(net, optimizer, files=False) as guard:
        total = 0.0
        for n in (1, 2):
            out, aim = net(torch.full((4, 3), float(n))), torch.full((4, 3), 100.0)
            total = total + (out - aim).norm() / aim.norm().clamp_min(1.0) + (out * 0).abs().sqrt().mean()
        total.backward()
        optimizer.step()
    (incident,) = guard.incidents
    assert abs(sum(t.min or 0.0 for t in incident.terms) - 2.0) < 0.1, incident.terms
    assert "total" not in [t.name for t in incident.terms]


def test_values_that_look_alike_are_told_with_more_digits() -> None:
    """`min 1 max 1` of an acosh would hide that some are above 1."""
    assert TensorStats("x", "float32", (2,), min=1.0, max=1.0000129).line() == "f32[2]  min 1.00000  max 1.00001"
    assert TensorStats("x", "float32", (2,), min=1.0, max=1.0).line() == "f32[2]  min 1  max 1"


def test_terms_that_are_weighted_are_not_shown_as_if_they_added_up() -> None:
    """Of a finite loss that is their mean, or weights one of them by a number, it is said; a plain sum is told as before."""

    def with_sum(summed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str:
        return note(broken(lambda model, x: summed((model(x) * x).square().sum(1).sqrt().mean(), model(x).square().mean())))

    assert with_sum(lambda rough, fine: rough + fine).startswith("terms of the loss: rough ")
    weighted = [with_sum(lambda rough, fine: rough + 0.1 * fine), with_sum(lambda rough, fine: (rough + fine) / 2)]
    assert all(words.startswith("terms of the loss (") and "), before what weights them: rough " in words for words in weighted), weighted
