"""A finite and absurd step is traced to its line, and only where one place is to blame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Sandbox
from torch import nn

import whynan
from whynan.trace.jumps import Jump


def train(steps: int, bad: dict[int, Any], make: Any, clip: bool = False, **options: Any) -> list[Any]:
    """Train a small model; `make(step, is_bad)` gives its loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with whynan.watch(model, optimizer, files=False, **options) as guard:
        for step in range(steps):
            loss = make(model, torch.randn(8, 4), bad.get(step))
            optimizer.zero_grad()
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return guard.incidents


def divided(model: nn.Module, x: torch.Tensor, size: float | None) -> torch.Tensor:
    """A loss over a denominator that comes with the batch."""
    below = torch.tensor(1.0 if size is None else size)
    return model(x).square().mean() / below


def test_a_tiny_denominator_is_named_and_the_place_is_proven() -> None:
    """Line, numbers, a remedy that was replayed; symptom kind absurd."""
    (incident,) = train(20, {11: 1e-13}, divided)
    assert (incident.cause.code, incident.step, incident.symptom.kind) == ("WN205", 11, "absurd")
    assert incident.origin.span.code == "return model(x).square().mean() / below"
    assert incident.cause.confidence == "proven"
    assert incident.remedies[0].result == "proven" and "clamp_min(0.1)" in incident.remedies[0].diff
    assert incident.action.taken == "observed"


def test_skip_leaves_the_step_out_and_tells_its_place() -> None:
    """The incident says what the spike policy did."""
    (incident,) = train(20, {11: 1e-13}, divided, spike="skip")
    assert (incident.cause.code, incident.action.taken) == ("WN205", "skipped")


def test_only_a_few_spikes_of_a_run_are_traced() -> None:
    """Each costs replays: after three there is only the warning."""
    assert len(train(40, dict.fromkeys((8, 14, 20, 26, 32), 1e-13), divided)) == 3


def test_a_program_that_clips_is_warned_and_not_alarmed() -> None:
    """Clipping bounds such a step; with a spike policy the place is told all the same."""
    assert train(20, {11: 1e-13}, divided, clip=True) == []
    assert [i.cause.code for i in train(20, {11: 1e-13}, divided, clip=True, spike="skip")] == ["WN205"]


def test_a_loss_that_is_large_with_the_usual_gradient_is_no_incident() -> None:
    """A constant added to the loss changes no weight."""
    assert train(20, {11: 1e9}, lambda m, x, plus: m(x).square().mean() + (plus or 0.0)) == []


def test_growth_over_many_operations_names_no_place() -> None:
    """Twelve factors of nine: no single one is to blame."""

    def grown(model: nn.Module, x: torch.Tensor, factor: float | None) -> torch.Tensor:
        y = model(x)
        for _ in range(12):
            y = y * (factor or 1.0)
        return y.square().mean()

    assert "WN205" not in [i.cause.code for i in train(20, {11: 9.0}, grown)]  # that the moments of such gradients are infinite is another matter


def test_weights_that_left_by_themselves_name_no_line() -> None:
    """With the same weights a healthy step is as absurd: the batch is not to blame."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with whynan.watch(model, optimizer, files=False) as guard:
        for step in range(20):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if step == 11:
                with torch.no_grad():
                    model.weight += 1e7
            optimizer.step()
    assert guard.incidents == []


def test_watching_a_spike_changes_no_bit() -> None:
    """The replays of a traced spike leave weights and random numbers as they are."""

    def run(spike: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        with whynan.watch(model, optimizer, files=False, spike=spike) as guard:
            for step in range(16):
                loss = divided(model, torch.randn(8, 4), 1e-13 if step == 11 else None)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        assert len(guard.incidents) == (spike == "warn")
        return [*(p.detach().clone() for p in model.parameters()), torch.rand(3)]

    assert all(map(torch.equal, run("warn"), run("off")))


@pytest.mark.parametrize(("value", "gone"), [(99.0, True), (101.0, False), (float("nan"), False)])
def test_a_spike_is_gone_near_its_level(value: float, gone: bool) -> None:
    """A hundred times the level is the border; a NaN is not gone."""
    assert Jump("loss", 1e9, 1.0).beyond(value, None) is not gone


@pytest.mark.parametrize("kept", [False, True], ids=["one after the other", "all kept"])
def test_a_training_is_not_compared_with_another(kept: bool) -> None:
    """Models trained one after the other in other units: nothing is a spike, no step is left out."""
    held = []
    with whynan.watch(files=False, spike="skip") as guard:
        for unit in (1.0, 1.0, 1e5, 1.0):
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            held += [(model, optimizer)] if kept else []
            for _ in range(12):
                before = model.weight.detach().clone()
                x = torch.randn(16, 3)
                loss = (model(x) - unit * x.sum(1, keepdim=True)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                assert not torch.equal(model.weight, before)
    assert guard.incidents == []


def test_a_later_training_keeps_its_name_and_its_absurd_step_is_traced_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The first training is gone by then; what was usual in it does not hide the other's spike."""
    with whynan.watch(files=False) as guard:
        for unit in (1e12, 1.0):
            model = nn.Linear(4, 1)
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            for step in range(20):
                loss = divided(model, torch.randn(8, 4), 1e-9 if step in (6, 13) and unit == 1.0 else None) * unit
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    assert [(i.cause.code, i.step) for i in guard.incidents] == [("WN205", 26), ("WN205", 33)]
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning: loss" in line]
    assert warned and all("loss of optimizer 1 " in line for line in warned)


def test_the_proof_of_a_spike_leaves_the_data_as_it_was(box: Sandbox) -> None:
    """The absurd batch is a row of a data set, a view: keeping it at the usual size for the proof changed the data set itself."""
    source = (Path(__file__).parent / "cases" / "WN205-absurd-value" / "bad_outlier.py").read_text(encoding="utf-8")
    source += "print(distances[17].max().item(), distances._version)\n"
    done = box.watched(source)
    assert [(i["cause"]["code"], i["cause"]["confidence"]) for i in done.incidents] == [("WN205", "proven")]
    assert done.out == box.plain(box.write(source)).out
