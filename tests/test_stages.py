"""Stages of health: what a user expects of a run, held while it runs and after the fact."""

from __future__ import annotations

import doctest
import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import strict_lines

import whynan
from whynan.commands.main import main
from whynan.errors import UsageError
from whynan.tripwire.stages import StageWatch, read_stages, stages_of

SPEC = {"stage": {"start": {"until": 10, "loss": "< 100", "loss_falls_by": "1%"}, "rest": {"lr": "<= 0.05", "weight": "-1 .. 0.01", "grad_norm": "< 1e9"}}}


def _train(tmp_path: Path, expect: object, steps: int = 20, bad: int = -1) -> Path:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(32, 3)
    with whynan.watch(model, optimizer, run_dir=tmp_path / "run", expect=expect):
        for step in range(steps):
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean() * (math.inf if step == bad else 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return tmp_path / "run"


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(importlib.import_module("whynan.tripwire.stages"))
    assert result.attempted and not result.failed


def test_a_run_says_at_the_end_of_each_stage_whether_it_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _train(tmp_path, SPEC)
    said = capsys.readouterr().err
    assert "whynan: stage start (steps 0 to 9) held: loss, loss_falls_by\n" in said
    assert "stage rest (steps 10 to 19) did not hold: weight is" in said and "it was to stay below 0.01" in said
    (warning,) = strict_lines(run / "warnings.jsonl")
    assert warning["kind"] == "limit" and warning["name"] == "weight" and warning["text"].endswith("(stage rest)")
    assert json.loads((run / "run.json").read_text())["watched"]["stages"][0].startswith("stage start (steps 0 to 9) held")


def test_what_held_leaves_no_warning_and_the_numbers_are_as_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _train(tmp_path / "a", {"stage": {"all": {"loss": "< 100", "weight": "< 50"}}})
    assert "stage all (steps 0 to 19) held: loss, weight" in capsys.readouterr().err and not (run / "warnings.jsonl").exists()
    plain = _train(tmp_path / "b", None)
    assert (run / "metrics.jsonl").read_text() == (plain / "metrics.jsonl").read_text()


def test_a_step_that_is_not_finite_does_not_hold_and_is_told_as_an_incident_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _train(tmp_path, {"stage": {"all": {"loss": "< 100"}}}, bad=5)
    assert "stage all (steps 0 to 19) did not hold: loss inf at step 5 is not < 100" in capsys.readouterr().err
    assert not (run / "warnings.jsonl").exists()


def test_crossings_warn_once_in_a_row_and_are_counted() -> None:
    watch = StageWatch(stages_of({"stage": {"a": {"loss": "<= 1", "until": 6}}}))
    said = [len(watch.see(step, {"loss": value})) for step, value in enumerate([1.0, 2.0, 3.0, 0.5, 2.0, 1.0])]
    watch.close()
    assert said == [0, 1, 0, 0, 1, 0]
    assert watch.said == ["stage a (steps 0 to 5) did not hold: loss 2 at step 1 is not <= 1, nor in 2 other steps"]


@pytest.mark.parametrize(
    ("values", "fall", "held"),
    [([4.0, 3.0, 2.0], 1, True), ([4.0, 3.0, 3.5], 1, False), ([4.0, 2.0, 1.9], "50%", True), ([4.0, 2.0, 2.1], "50%", False), ([], 1, True)],
)
def test_a_fall_is_judged_from_the_first_to_the_last_values(values: list[float], fall: object, held: bool) -> None:
    watch = StageWatch(stages_of({"stage": {"a": {"loss_falls_by": fall}}}))
    for step, value in enumerate(values):
        watch.see(step, {"loss": value})
    watch.close()
    assert ("did not hold" in watch.said[0]) is not held


def test_a_stage_that_was_not_reached_or_not_known_is_said_so() -> None:
    watch = StageWatch(stages_of({"stage": {"a": {"until": 5, "grad_norm": "< 1"}, "b": {"loss": "< 1"}}}))
    watch.see(0, {"loss": 1.0})
    watch.close()
    assert watch.said == ["stage a (step 0, until 5 not reached) could not be checked; not known: grad_norm", "stage b (from step 5) was not reached"]


WRONG = {
    "no stages": ("x = 1\n", "no stages in it"),
    "not TOML": ("[stage\n", "not TOML"),
    "a bound that is none": ('[stage.a]\nloss = "small"\n', "stage a: loss is written as"),
    "a number without a sign": ("[stage.a]\nloss = 10\n", "stage a: loss is written as"),
    "an end that is no step": ('[stage.a]\nuntil = "x"\nloss = "< 1"\n', "'until' is a step after 0, not 'x'"),
    "ends that go back": ('[stage.a]\nuntil = 9\nloss = "< 1"\n[stage.b]\nuntil = 5\nloss = "< 1"\n', "'until' is a step after 9, not 5"),
    "an endless stage first": ('[stage.a]\nloss = "< 1"\n[stage.b]\nloss = "< 1"\n', "stage b never begins"),
    "nothing expected": ("[stage.a]\nuntil = 3\n", "stage a expects nothing"),
    "a fall that is none": ('[stage.a]\nloss_falls_by = "much"\n', "loss_falls_by is a number"),
    "another table": ('[stage.a]\nloss = "< 1"\n[other]\n', "'other' is no stage"),
    "a range upside down": ('[stage.a]\nloss = "3 .. 1"\n', "stage a: loss is written as"),
}


@pytest.mark.parametrize(("text", "line"), WRONG.values(), ids=WRONG)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: str) -> None:
    file = tmp_path / "stages.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match="--expect"):
        read_stages(file)
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 1}\n')
    assert main(["check", str(tmp_path / "log.jsonl"), "--expect", str(file)]) == 2
    assert main(["run", "--expect", str(file), "nothing.py"]) == 2
    said = capsys.readouterr().err
    assert said.count(line) == 2 and said.count("\n") == 2


def test_a_missing_file_is_one_clear_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "--expect", str(tmp_path / "gone.toml"), "nothing.py"]) == 2
    assert "gone.toml: No such file" in capsys.readouterr().err


PLATES = Path(__file__).parent.parent / "docs" / "casebook" / "hyper_connections.md"


def test_a_log_of_somebody_else_is_held_to_stages_by_what_its_names_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The stages of the casebook page, on a log with the curves of that run; the loss has another name here."""
    text = PLATES.read_text().split("<!-- file: stages.toml -->\n```toml\n")[1].split("```")[0]
    (tmp_path / "stages.toml").write_text(text)
    rows = [{"step": s, "train/loss": 1.6 * math.exp(-s / 40) if s < 104 else "nan", "learning_rate": 9e-3, "blocks.0.alpha": 0.3} for s in range(168)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["check", str(tmp_path / "log.jsonl"), "--expect", str(tmp_path / "stages.toml")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "not known" not in said
    assert "stage first-epochs (steps 0 to 47) held: *.alpha, loss_falls_by" in said
    assert "stage middle (steps 48 to 119) did not hold: loss nan at step 104 is not < 1" in said
    assert "lr 0.009 at step 48 is not <= 3e-3" in said
    assert "stage scale-up (steps 120 to 167) did not hold: loss nan at step 120" in said


def test_a_name_that_a_log_does_not_have_is_not_said_to_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.toml").write_text('[stage.a]\nloss = "< 5"\n"*.alpha" = "< 1"\n')
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"step": s, "loss": 1.0 / (s + 1)}) + "\n" for s in range(50)))
    assert main(["check", str(tmp_path / "log.jsonl"), "--expect", str(tmp_path / "s.toml")]) == 0
    assert "stage a (steps 0 to 49) held: loss; not known: *.alpha" in capsys.readouterr().out


def test_numbers_and_a_file_of_stages_go_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "s.toml").write_text('[stage.a]\nloss = "< 5"\n')
    (tmp_path / "log.jsonl").write_text("".join(json.dumps({"step": s, "loss": 1.0 / (s + 1), "lr": 4e-4}) + "\n" for s in range(50)))
    main(["check", str(tmp_path / "log.jsonl"), "--expect", "lr=1e-4", "--expect", str(tmp_path / "s.toml")])
    said = capsys.readouterr().out
    assert "0.0001 was expected" in said and "stage a (steps 0 to 49) held: loss" in said


def test_files_of_a_run_directory_that_are_no_logs_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _train(tmp_path, SPEC)
    capsys.readouterr()
    main(["check", str(run)])
    said = " ".join(capsys.readouterr().out.split())
    assert "passed over 2 other files (run.json, warnings.jsonl)" in said
