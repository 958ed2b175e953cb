"""Checkpoints and validations every so many updates, of a loop that nobody changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Sandbox
from jobs import job
from torch import nn

import whynan
from whynan.errors import UsageError

TRAIN = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(256, 4)
data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 32)
criterion = nn.MSELoss()
for step, (inputs, targets) in enumerate(data):
    if step == 5:
        targets[0] = float("nan")
    loss = criterion(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step + 1 == 21:  # one was left out
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, "own.pt")
print([p.double().sum().item() for p in model.state_dict().values()], scheduler.last_epoch)
"""

CHECKS = """
import random
import torch

def held_out(model):
    assert not model.training and not torch.is_grad_enabled()
    x = torch.randn(64, 4)
    random.random()
    return {"error": (model(x) - x.sum(1, keepdim=True)).abs().mean(), "one": 1}

def over_all_ranks(model):
    assert type(model).__name__ == "Sequential"
    ranks = torch.ones(())
    torch.distributed.all_reduce(ranks)
    return {"ranks": ranks}

def nothing():
    return float("nan")

def failing(model):
    raise ValueError("no such file")

def text(model):
    return "good"
"""


@pytest.fixture
def folder(box: Sandbox) -> Sandbox:
    """A sandbox with the functions to validate by."""
    box.write(CHECKS, "checks.py")
    return box


def rows(box: Sandbox) -> list[dict[str, float]]:
    """What the validations gave."""
    return [json.loads(line) for line in (box.run_dir / "validation.jsonl").read_text().splitlines()]


def test_checkpoints_and_validations_come_with_the_updates_and_leave_no_trace_in_the_training(folder: Sandbox) -> None:
    """Dropout, statistics, a shuffling loader and both generators are as in the run that was only watched."""
    plain = folder.watched(TRAIN)
    done = folder.watched(TRAIN, "--save-every", "10", "--validate", "checks.py:held_out", "--validate-every", "15")
    assert done.status == 0, done.err
    assert done.out == plain.out
    assert [row["updates"] for row in rows(folder)] == [15, 30]
    assert all(row["error"] > 0 and row["one"] == 1 for row in rows(folder))
    assert "whynan: validation after 15 updates: error " in done.err
    assert sorted(p.name for p in (folder.run_dir / "checkpoints").iterdir()) == ["step-00000010.pt", "step-00000020.pt", "step-00000030.pt"]


def test_a_checkpoint_holds_everything_after_its_update(folder: Sandbox) -> None:
    """The scheduler has followed; names are the program's own; the validation of that update is in it."""
    folder.watched(TRAIN, "--save-every", "10", "--validate", "checks.py:held_out", "--validate-every", "10")
    saved = torch.load(folder.run_dir / "checkpoints" / "step-00000020.pt", weights_only=True)
    own = torch.load(folder.folder / "own.pt", weights_only=True)
    assert saved.keys() == {"model", "optimizer", "scheduler", "validation", "step"}
    assert saved["step"] == 20
    assert saved["scheduler"]["last_epoch"] == own["scheduler"]["last_epoch"] == 20
    assert all(torch.equal(saved["model"][name], value) for name, value in own["model"].items())
    moments = own["optimizer"]["state"]
    assert all(torch.equal(saved["optimizer"]["state"][n]["exp_avg"], moments[n]["exp_avg"]) for n in moments)
    assert saved["validation"]["error"] == pytest.approx(rows(folder)[1]["error"])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("failing", "whynan: no validation any more: ValueError: no such file"),
        ("text", "whynan: no validation any more: the validation function returns a number, or numbers by name, not str"),
        ("absent", "whynan: no validation any more: checks.py has no 'absent'"),
        ("nothing", "whynan: warning: validation: loss is nan after 10 updates"),
    ],
)
def test_what_goes_wrong_in_a_validation_is_said_and_the_training_goes_on(folder: Sandbox, function: str, said: str) -> None:
    """Once for all, but for a value that is not finite, which is a warning; every module is back in training mode."""
    done = folder.watched(TRAIN, "--validate", f"checks.py:{function}", "--validate-every", "10")
    assert done.status == 0
    assert done.err.count(said) == 1, done.err
    assert done.out == folder.watched(TRAIN).out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"validate_every": 3}, "belong together"),
        ({"validate": "checks.py:held_out"}, "belong together"),
        ({"validate": "nowhere.py:held_out", "validate_every": 3}, "is not there"),
        ({"validate": "held_out", "validate_every": 3}, "is not there"),
        ({"validate": 3, "validate_every": 3}, "validate is a function"),
        ({"save_every": -1}, "save_every is a whole number"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], said: str) -> None:
    """One line, before anything is trained."""
    with pytest.raises(UsageError, match=said):
        whynan.watch(**options)


def test_without_a_run_directory_there_is_nowhere_to_save() -> None:
    """Said once; the run goes on."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whynan.watch(model, optimizer, files=False, save_every=1) as guard:
        said: list[str] = []
        guard._guard.journal.say = lambda text, always=False: said.append(text)  # type: ignore[method-assign]
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert [line for line in said if "checkpoints" in line] == ["whynan: no checkpoints any more: there is no run directory to write them to"]


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    """The last good one stays."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with whynan.watch(model, optimizer, run_dir=tmp_path, save_every=2, policy="observe"):
        for step in range(4):
            model(torch.full((1, 2), float("nan") if step == 3 else 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000002.pt"]


RANKS = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):  # what the last update makes due comes when the process group is gone
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_of_several_ranks_the_first_writes_and_all_validate(folder: Sandbox) -> None:
    """All, because a validation may hold a collective, as this one does; the names are those of the model inside."""
    path = folder.write(RANKS)
    done = job(folder, 2, {}, "--save-every", "2", "--validate", "checks.py:over_all_ranks", "--validate-every", "2", program=path)
    assert done.status == [0, 0], done.text
    assert rows(folder) == [{"updates": 2, "ranks": 2.0}, {"updates": 4, "ranks": 2.0}]
    saved = torch.load(folder.run_dir / "checkpoints" / "step-00000004.pt", weights_only=True)
    assert "0.weight" in saved["model"]
    assert not list(folder.run_dir.glob("ranks/*/checkpoints"))
