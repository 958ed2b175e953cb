"""`whynan probe`: from which value on a scalar before an exponential makes this model's step finite."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from whynan.probing.attacking import Attacks
from whynan.probing.steps import attempt, step_of, values_of
from whynan.probing.subject import subject_of
from whynan.probing.temperatures import scalars_of, verdict_notes

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]


def _attacks(loss: Loss, seed: int = 0, width: int = 12) -> Attacks:
    torch.manual_seed(seed)
    model = torch.nn.Linear(16, width)
    return Attacks(step_of(subject_of({"model": model, "loss_fn": loss, "batch": torch.randn(32, 16) * 5}, "test")))


def _notes(loss: Loss, seed: int = 0) -> list[str]:
    attacks = _attacks(loss, seed)
    verdict_notes(attacks)
    return [note.line() for note in attacks.found]


def _sharp(temperature: float) -> Loss:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        chances = torch.softmax(model(batch) / temperature, dim=-1)
        return (chances**0.6).sum()

    return loss


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_number_is_the_edge_of_this_model(seed: int) -> None:
    """Just above it the step is finite, clearly below it is not; another model has another number."""
    (note,) = _notes(_sharp(0.01), seed)
    found = re.search(r"/ 0\.01: the sample step is finite from ([\d.]+) up; here 0\.01", note)
    assert found is not None, note
    edge = float(found[1])
    for temperature, fine in ((edge * 1.01, True), (edge * 0.85, False)):
        step = _attacks(_sharp(temperature), seed).step
        assert attempt(step, values_of(step)).fine is fine


def test_a_finite_step_says_how_near_the_edge_is() -> None:
    (note,) = _notes(_sharp(0.25))
    assert re.search(r"/ 0\.25: finite from 0\.\d+ up on the sample; here 0\.25", note), note


def test_a_learned_multiplier_is_known_by_what_it_does() -> None:
    """A parameter of one element, an overflowing exp, and the other side is the safe one."""
    model = torch.nn.Linear(16, 12)
    model.register_parameter("gain", torch.nn.Parameter(torch.tensor(40.0)))

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return torch.exp((model(batch) * model.gain).transpose(0, 1)).mean()

    torch.manual_seed(0)
    attacks = Attacks(step_of(subject_of({"model": model, "loss_fn": loss, "batch": torch.randn(32, 16) * 3}, "test")))
    verdict_notes(attacks)
    (note,) = [n.line() for n in attacks.found]
    assert re.search(r"\* 40: the sample step is finite from [\d.]+ down; here 40", note), note


def test_two_temperatures_of_one_product_are_told_together() -> None:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch)
        both = torch.softmax(logits / 0.02, dim=-1) * torch.softmax(logits.flip(0) / 0.03, dim=-1)
        return (both**0.6).sum()

    notes = _notes(loss)
    together = re.search(r"together, the sample step is finite with 0\.02 from ([\d.]+) up, 0\.03 from ([\d.]+) up", notes[-1])
    assert together is not None and 0.02 < float(together[1]) < float(together[2]), notes


def _attention(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    x = model(batch)
    return torch.softmax(x @ x.T / 12**0.5, dim=-1).pow(2).mean()


def _stable(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model(batch) / 0.01, dim=-1).mean()


def _elsewhere(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) / 0.01).square().mean()


def _between(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.tanh(model(batch) / 0.01), dim=-1).pow(0.6).mean()


@pytest.mark.parametrize("loss", [_attention, _stable, _elsewhere, _between])
def test_a_scalar_that_is_not_dangerous_gets_no_note(loss: Loss) -> None:
    assert _notes(loss) == []


def test_scalars_are_found_through_views_and_masks_with_their_lines() -> None:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        scores = model(batch).div(0.5).view(4, 8, 12)
        scores = scores.masked_fill(scores > 100, -1e9) - scores.amax(-1, keepdim=True)
        return torch.softmax(scores, -1).mean()

    (found,) = scalars_of(_attacks(loss).step)
    assert (found.value, found.divides) == (0.5, True) and found.places[0].startswith("tests/test_probe_temperatures.py:")


def test_a_step_that_raises_is_left_alone() -> None:
    attacks = _attacks(_sharp(0.1))

    def broken(values: object) -> torch.Tensor:
        raise RuntimeError("no")

    attacks.step.call = broken  # type: ignore[assignment]
    verdict_notes(attacks)
    assert attacks.found == []
