"""Two hunts of the casebook, end to end: the batch without variance, and the padded sample nobody attends to."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import ENVIRONMENT, Finished, Sandbox, Shown
from doc_blocks import compare, in_the_table

BOOK = Path(__file__).resolve().parent.parent / "examples" / "casebook"
CASES = ("transcoder", "token_image")
SHORT = {"transcoder": ("--steps", "4"), "token_image": ("--texts", "128")}


def read(name: str) -> dict[str, Any]:
    """The description of a case."""
    return tomllib.loads((BOOK / name / "case.toml").read_text(encoding="utf-8"))


def watched(box: Sandbox, name: str, *argv: str, options: tuple[str, ...] = (), healed: bool = False) -> Finished:
    """Copy a case and run it under `whynan run` in a forked child."""
    source = BOOK / name / ("healed" if healed else "")
    for file in source.glob("*.py"):
        shutil.copy(file, box.folder)
    return box.forked("run", "--run-dir", str(box.run_dir), *options, "train.py", *argv, before=lambda: sys.path.insert(0, str(box.folder)))


def line_of(path: Path, text: str) -> int:
    """The number of the one line with this text."""
    found = [n for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if text in line]
    assert len(found) == 1, found
    return found[0]


def at_the_true_line(incident: dict[str, Any], name: str) -> None:
    """The incident has the code and the line that the case describes, and a proven remedy is first."""
    expected = read(name)["expected"]
    origin = incident["origin"]
    assert incident["cause"]["code"] == expected["code"]
    assert (origin["file"], origin["line"]) == (expected["file"], line_of(BOOK / name / expected["file"], expected["text"]))
    assert incident["cause"]["confidence"] == "proven"
    assert incident["remedies"][0]["result"] == "proven"


def quality(out: str) -> tuple[float, float]:
    """The last line of a program: what it reached, and what it started from."""
    words = out.strip().splitlines()[-1].split()
    assert words[0] == "quality"
    return float(words[1]), float(words[3].rstrip(")"))


@pytest.mark.parametrize("name", CASES)
def test_failing_program_is_found_at_its_true_line(tmp_path: Path, name: str) -> None:
    done = watched(Sandbox(tmp_path), name, *SHORT[name])
    assert "internal error" not in done.err
    at_the_true_line(done.incidents[0], name)


@pytest.mark.parametrize("name", CASES)
def test_healed_program_differs_by_the_printed_remedy_alone(tmp_path: Path, name: str) -> None:
    remedy = read(name)["remedy"]
    changed: list[str] = []
    for file in sorted((BOOK / name).glob("*.py")):
        before, after = (p.read_text(encoding="utf-8").splitlines() for p in (file, BOOK / name / "healed" / file.name))
        changed += [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert [line[0] for line in changed] == ["-", "+"]
    assert remedy["removed"] in changed[0] and remedy["added"] in changed[1]
    done = watched(Sandbox(tmp_path), name, *(SHORT[name] if name == "transcoder" else ("--texts", "224")))
    printed = [line[1:].strip() for line in done.incidents[0]["remedies"][0]["diff"].splitlines() if line.startswith("+ ")]
    assert printed == [changed[1][1:].strip()]


@pytest.mark.parametrize("name", CASES)
def test_healed_program_trains_to_its_quality(tmp_path: Path, name: str, shown: Shown) -> None:
    """And the line of the casebook's table says which."""
    done = watched(Sandbox(tmp_path), name, healed=True)
    reached, untrained = quality(done.out)
    assert not done.incidents
    assert reached <= read(name)["quality"]["at_most"] < untrained
    in_the_table(shown("docs/casebook/index.md")[0], name, untrained, reached)


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("transcoder", ("--steps", "5", "--seed", "8")),
        ("transcoder", ("--steps", "4", "--hookpoints", "transformer.blocks.1")),
        ("transcoder", ("--steps", "4", "--optimizer", "sign")),
        ("token_image", ("--texts", "128", "--seed", "19")),
        ("token_image", ("--texts", "128", "--depth", "1")),
        ("token_image", ("--texts", "128", "--dtype", "float32")),
        ("token_image", ("--texts", "128", "--dtype", "float16")),
    ],
)
def test_diagnosis_follows_another_seed_layer_and_dtype(tmp_path: Path, name: str, argv: tuple[str, ...]) -> None:
    done = watched(Sandbox(tmp_path), name, *argv)
    at_the_true_line(done.incidents[0], name)


def test_transcoder_says_why_and_what_does_not_help(tmp_path: Path) -> None:
    done = watched(Sandbox(tmp_path), "transcoder", "--steps", "8")
    incident = done.incidents[0]
    evidence = "\n".join(incident["cause"]["evidence"])
    for text in ("64 rows, 1 unique", "input_ids of DiffusionLM: i64[1, 64], all 64 are 128", "a hook of transformer.blocks.0"):
        assert text in evidence
    assert "an eps in the denominator: finite, but" in evidence
    assert "a fresh zeros_like in its place: the replay raised RuntimeError" in evidence
    assert incident["origin"]["from"][0]["label"] == "the variance of 64 identical rows"
    assert any(e["question"] == "the update with these gradients" and "Adam would make" in e["answer"] for e in incident["experiments"])
    assert "input_ids of DiffusionLM held one value only in 2 of 128 batches since step 0" in done.err
    assert "2 incidents in 8 steps, at 2, 6" in done.err


def test_transcoder_hookpoint_is_named_where_there_are_two(tmp_path: Path) -> None:
    points = ("--hookpoints", "transformer.blocks.0", "transformer.blocks.1")
    done = watched(Sandbox(tmp_path), "transcoder", "--steps", "3", *points)
    assert "a hook of transformer.blocks.0" in "\n".join(done.incidents[0]["cause"]["evidence"])
    assert "fvu/transformer.blocks.1" in done.out


def test_sign_based_optimizer_survives_by_accident_and_this_is_said(tmp_path: Path) -> None:
    done = watched(Sandbox(tmp_path), "transcoder", "--steps", "4", "--optimizer", "sign")
    assert "SignSGD would leave all 66 112 weights finite, by accident" in "\n".join(done.incidents[0]["cause"]["evidence"])


def test_finite_and_absurd_loss_in_float32_is_noticed_and_can_be_skipped(tmp_path: Path) -> None:
    done = watched(Sandbox(tmp_path), "transcoder", "--steps", "4", "--dtype", "float32", options=("--spike", "skip"))
    warnings = [json.loads(line) for line in (done.run_dir / "warnings.jsonl").read_text().splitlines()]
    (incident,) = done.incidents
    assert (incident["cause"]["code"], incident["action"]["taken"], incident["symptom"]["kind"]) == ("WN404", "skipped", "absurd")
    at_the_true_line(incident, "transcoder")
    assert "64 rows, 1 unique up to rounding" in incident["cause"]["evidence"]
    assert incident["remedies"][0]["result"] == "proven"
    assert any(w["kind"] == "spike" and w["step"] == 2 and w["value"] > 1e11 for w in warnings)
    assert "step 2 skipped: a spike" in done.err


def test_token_image_names_the_sample_and_the_threshold_behind_the_mask(tmp_path: Path) -> None:
    done = watched(Sandbox(tmp_path), "token_image", *SHORT["token_image"])
    incident = done.incidents[0]
    labels = {span["line"]: span["label"] for span in incident["origin"]["from"]}
    threshold = line_of(BOOK / "token_image" / "model.py", "valid = coverage > self.threshold")
    assert labels[threshold] == "decided here: in row 4 no entry counts: the largest value is 0.5, the limit 0.5"
    evidence = "\n".join(incident["cause"]["evidence"])
    assert "sample 4 is number 77 of Texts, in batch 3 of this pass: text 'rekasu motila" in evidence
    assert "an `if` that asks whether everything is masked (here 64 of 1024 rows): still not finite" in evidence
    assert "only hides it: nan_to_num" in evidence
    assert float(incident["remedies"][0]["effect"].split()[1].rstrip(",")) < 2  # without the gradient scale


@pytest.mark.parametrize("ranks", [2, 4])
def test_transcoder_under_torchrun_is_told_once_with_its_rank(tmp_path: Path, ranks: int, shown: Shown) -> None:
    """With four ranks by the command of the page."""
    line, output = shown("docs/casebook/transcoder.md") if ranks == 4 else ("torchrun --nproc-per-node 2 -m whynan run train.py --steps 4", "")
    words = shlex.split(line.replace("whynan run", "whynan run --run-dir run"))
    for file in (BOOK / "transcoder").glob("*.py"):
        shutil.copy(file, tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    environment = {**ENVIRONMENT, "TRACKER": "offline", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    incidents = [json.loads(line) for line in (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()]
    at_the_true_line(incidents[0], "transcoder")
    assert done.stderr.count("error[WN404]") == 1
    compare(output, done.stderr)
    assert sorted(f.name for f in (tmp_path / "tracker").iterdir()) == [f"rank-{n}.jsonl" for n in range(ranks)]
    keys = json.loads((tmp_path / "tracker" / "rank-1.jsonl").read_text().splitlines()[0])
    assert "fvu/transformer.blocks.0" in keys
