"""What the casebook's hunts taught the core, on programs of another kind."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Shown
from doc_blocks import compare

import whynan
from whynan.doctoring.project import read_project
from whynan.records import Incident


def incidents_of(source: str, tmp_path: Path, **options: Any) -> tuple[list[Incident], dict[str, Any]]:
    """Run a program from a file, watched; return its incidents and its names."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(source))
    scope: dict[str, Any] = {"__name__": "program"}
    torch.manual_seed(0)
    with whynan.watch(files=False, **options) as guard:
        exec(compile(file.read_text(), str(file), "exec"), scope)
    return list(guard.incidents), scope


def written(incident: Incident) -> str:
    return next(line[1:].strip() for line in incident.remedies[0].diff.splitlines() if line.startswith("+") and not line.startswith("+++"))


POWERS = [
    ("torch.log((torch.pow(p, 0.5) / 3.0 * one).sum(-1))", "torch.exp(0.5 * torch.log_softmax(z, -1))"),
    ("torch.log((p * q).pow(0.7).sum(dim=1))", "torch.logsumexp(0.7 * (torch.log_softmax(z, -1) + torch.log_softmax(2 * z, dim=-1)), dim=1)"),
    ("(p ** 0.25).sum(-1)", "torch.exp(0.25 * torch.log_softmax(z, -1))"),
]


@pytest.mark.parametrize(("expression", "healed"), POWERS)
def test_a_power_of_probabilities_is_taken_in_log_space(expression: str, healed: str, tmp_path: Path) -> None:
    """The remedy is written for the spelling at hand and proven with the same loss; a clamp is not the first one."""
    found, _ = incidents_of(
        f"""
        import torch
        layer = torch.nn.Linear(4, 6)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        one = torch.ones(6)
        z = 400 * layer(torch.randn(8, 4))
        p = torch.softmax(z, -1)
        q = torch.softmax(2 * z, dim=-1)
        loss = ({expression}).mean()
        loss.backward()
        optimizer.step()
        """,
        tmp_path,
    )
    assert found[0].cause.code == "WN501" and found[0].remedies[0].result == "proven" and found[0].remedies[0].safe
    assert healed in written(found[0])


def test_an_exponential_that_a_sum_divides_gets_its_largest_exponent_taken_out(tmp_path: Path) -> None:
    """The factor cancels, so the mathematics is the same; the dimension is that of the sum."""
    found, _ = incidents_of(
        """
        import torch
        layer = torch.nn.Linear(4, 5)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        scores = 300 * layer(torch.randn(8, 4))
        weights = torch.exp(scores)
        total = weights.sum(dim=1, keepdim=True)
        loss = (weights / total * scores).mean()
        loss.backward()
        optimizer.step()
        """,
        tmp_path,
    )
    assert found[0].cause.code in ("WN201", "WN303") and found[0].remedies[0].result == "proven"
    assert "scores - scores.amax(dim=1, keepdim=True)" in written(found[0])


def test_a_buffer_is_replayed_by_what_writes_it(tmp_path: Path) -> None:
    """A moving average goes bad in a call whose result the loss does not depend on: the row is found, not 'not reproducible'."""
    found, scope = incidents_of(
        """
        import torch
        layer, norm = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        x = torch.randn(8, 3)
        for step in range(3):
            seen = x.clone()
            if step == 1:
                seen[5] = float("nan")
            norm(layer(seen).detach())
            loss = layer(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
        tmp_path,
    )
    assert [i.cause.code for i in found] == ["WN701"] and found[0].origin.samples == (5,)
    assert scope["norm"].running_mean.isfinite().all()


def test_zeroed_gradients_are_not_stepped_on(tmp_path: Path, shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    """A loop that zeroes bad gradients and steps: momentum would move the weights, so the update is left out."""
    found, scope = incidents_of(
        """
        import torch
        layer = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        moved = []
        for step in range(4):
            x = torch.full((4, 3), float("nan")) if step == 2 else torch.randn(4, 3)
            loss = layer(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            if torch.isnan(norm):
                optimizer.zero_grad(set_to_none=False)
            before = layer.weight.detach().clone()
            optimizer.step()
            moved.append(not torch.equal(before, layer.weight))
        """,
        tmp_path,
    )
    assert [i.step for i in found] == [2] and scope["moved"] == [True, True, False, True]
    compare(shown("docs/casebook/joint_diffusion.md")[0], capsys.readouterr().err)


def test_settings_of_another_program_are_not_judged(tmp_path: Path) -> None:
    """A workflow beside the sources has keys that no Python code reads; a training's own file has mostly ones that it does."""
    (tmp_path / "train.py").write_text("import yaml\nc = yaml.safe_load(open('c.yaml'))\nprint(c['lr'], c['steps'], c['seed'])\n")
    (tmp_path / "workflow.yaml").write_text("name: ci\nimage: python\nport: 80\n")
    (tmp_path / "c.yaml").write_text("lr: 1.0e-3\nsteps: 10\nseed: 0  # fixed\nwarmup: 5\n")
    remarks, _ = read_project(tmp_path)
    assert [r.text for r in remarks] == ["`warmup: 5` is set and no code reads it"]
