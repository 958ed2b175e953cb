"""The casebook, second part: joint_diffusion, clustering_heads and hyper_connections fail as told, are explained, and heal.

Every program is run as a user would run it, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import Shown
from doc_blocks import ROOT, compare, in_the_table, steps_of

from whynan.doctoring.project import recommend_settings

CASES = Path(__file__).parent.parent / "examples" / "casebook"
NAMES = ["joint_diffusion", "clustering_heads", "hyper_connections"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}  # half precision is rounded otherwise


def case_of(name: str) -> dict[str, Any]:
    return tomllib.loads((CASES / name / "case.toml").read_text())


def command(*words: object, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], cwd=folder, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=280)


def arguments(case: dict[str, Any], key: str, out: Path) -> list[str]:
    return [word.replace("{out}", str(out)) for word in case[key]]


class Watched:
    """A run under `whynan run`, and what it wrote."""

    def __init__(self, name: str, words: list[str], home: Path, options: tuple[str, ...] = (), **variables: str) -> None:
        self.done = command("-m", "whynan", "run", *options, "--run-dir", home, *words, folder=CASES / name, **variables)
        file = home / "incidents.jsonl"
        self.incidents = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    @property
    def printed(self) -> str:
        """What the program said, and then what whynan did."""
        return self.done.stdout + self.done.stderr

    def __getitem__(self, code: str) -> dict[str, Any]:
        found = [i for i in self.incidents if i["cause"]["code"] == code]
        assert found, (self.done.stdout[-500:], self.done.stderr[-3000:])
        return found[0]


def quality(text: str) -> float:
    found = re.search(r"quality (\S+) \(untrained \S+\)\s*$", text)
    assert found, text[-500:]
    return float(found[1])


def good_enough(value: float, case: dict[str, Any]) -> bool:
    bounds = case["quality"]
    return bounds.get("at_least", float("-inf")) <= value <= bounds.get("at_most", float("inf"))


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the plate reader that is resumed later: two healthy epochs."""
    out = tmp_path_factory.mktemp("plates")
    done = command(*arguments(case_of("hyper_connections"), "before", out), folder=CASES / "hyper_connections")
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An output folder; for the plate reader a copy of the first run."""
    target = tmp_path / "run"
    if "hyper_connections" in request.node.nodeid or "plate" in request.node.nodeid:
        shutil.copytree(request.getfixturevalue("first_run"), target)
    return target


@pytest.mark.parametrize("name", NAMES)
def test_the_failing_program_gives_the_true_line_the_code_and_the_remedy_that_heals(name: str, out: Path, tmp_path: Path, shown: Shown) -> None:
    """Origin, code and first remedy are those of case.toml; the remedy is proven and is the only difference of healed/; its page shows what is printed."""
    case = case_of(name)
    told: list[str] = []
    words = [*arguments(case, "failing", out), *case["short"]]
    if name != "clustering_heads":  # docs/casebook/clustering_heads.md runs it itself
        line, *told = shown(f"docs/casebook/{name}.md")
        words = [word.replace("run/", f"{out}/") if word != "run" else str(out) for word in shlex.split(line)[2:]]
    run = Watched(name, words, tmp_path / "w")
    for output in told:
        compare(output, run.done.stderr + (tmp_path / "w" / "report.md").read_text())
    incident = run[case["expected"]["code"]]
    assert incident["origin"]["file"].endswith(case["expected"]["file"])
    assert case["expected"]["text"] in incident["origin"]["code"]
    assert incident["origin"]["exact"] and incident["cause"]["confidence"] == "proven"
    first = incident["remedies"][0]
    assert first["result"] == "proven" and f"+{case['remedy']['added']}" in re.sub(r"(?m)^\+\s+", "+", first["diff"])
    written = [line for line in first["diff"].splitlines() if line.startswith("+")]
    assert not any(word in line for line in written for word in ("clamp", "nan_to_num", "zeros_like"))
    for code in case["expected"].get("also", []):
        assert run[code]
    if name == "joint_diffusion":
        said = " ".join(repr(recommend_settings(CASES / name / "config.yaml", [tmp_path / "w"])).replace("\n#  ", "").split())
        assert "gradient_accumulation_steps: 4 -> 1" in said and "is a fault of the arithmetic there" in said, "no rate is blamed for a slope"
        assert "learning_rate: 4" not in said.partition("---")[0]
    assert set(INSIDE[name]) <= {value["name"] for value in incident["inside"]}
    assert set(TERMS[name]) <= {term["name"] for term in incident["terms"]}


INSIDE = {
    "joint_diffusion": ("stream", "update", "self.mix"),
    "clustering_heads": ("prior", "pmi: student", "pmi: p1", "pmi: p2"),
    "hyper_connections": ("pooled", "read", "write", "logits", "mix", "inner", "self.alpha", "sinkhorn: matrix"),
}
TERMS: dict[str, tuple[str, ...]] = {"joint_diffusion": ("of_text", "of_latents"), "clustering_heads": ("value[0]", "value[7]"), "hyper_connections": ()}


@pytest.mark.parametrize("name", NAMES)
def test_healed_differs_by_one_line_only(name: str) -> None:
    """The files of healed/ are the failing ones with the remedy's line in place of the old one."""
    case, changed = case_of(name), []
    for file in sorted((CASES / name / "healed").iterdir()):
        if not file.is_file():
            continue
        before, after = ((folder / file.name).read_text().splitlines() for folder in (CASES / name, CASES / name / "healed"))
        assert len(before) == len(after)
        changed += [(file.name, a.strip(), b.strip()) for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [(case["remedy"]["file"], case["remedy"]["removed"], case["remedy"]["added"])]


@pytest.mark.parametrize("name", NAMES)
def test_the_healed_program_reaches_its_quality(name: str, out: Path, shown: Shown) -> None:
    """It trains to the end and is better than the untrained model by the margin stated; the casebook's table says by which."""
    case = case_of(name)
    done = command(*arguments(case, "healed", out), folder=CASES / name / "healed")
    assert done.returncode == 0, done.stderr
    assert good_enough(quality(done.stdout), case) and not good_enough(case["quality"]["untrained"], case)
    in_the_table(shown("docs/casebook/index.md")[0], name, case["quality"]["untrained"], quality(done.stdout))


SECOND = [
    ("joint_diffusion", ["--seed", "3", "--dtype", "float32", "--steps", "90"]),
    ("clustering_heads", ["--seed", "5", "--dtype", "bfloat16", "--steps", "2"]),
    ("hyper_connections", ["--seed", "2"]),
]


@pytest.mark.parametrize(("name", "more"), SECOND)
def test_broken_in_a_second_way_the_diagnosis_follows(name: str, more: list[str], out: Path, tmp_path: Path) -> None:
    """Another seed, another layer, another dtype: the same cause at the same line."""
    case = case_of(name)
    incident = Watched(name, [*arguments(case, "failing", out), *more], tmp_path / "w", ("--policy", "stop"))[case["expected"]["code"]]
    assert case["expected"]["text"] in incident["origin"]["code"]


def test_joint_diffusion_is_told_dead_once_and_since_when(tmp_path: Path, shown: Shown) -> None:
    """Observed only, the loop warns at each step over a dead model; whynan says it once, with the step of the death."""
    line, dead_told, checked = shown("docs/casebook/joint_diffusion.md")
    run = Watched("joint_diffusion", shlex.split(line.replace("--out run", f"--out {tmp_path / 'run'}"))[2:], tmp_path / "w")
    compare(dead_told, run.done.stderr)
    born, dead = run["WN501"], run["WN601"]
    assert run.done.stdout.count("warning: NaN gradient") > 30 and len(run.incidents) == 2
    assert born["symptom"]["kind"] == "inf" and born["symptom"]["place"] == "gradient"
    assert any(f"the gradient of `{born['symptom']['name']}` was infinite before clipping" in e for e in born["cause"]["evidence"])
    assert f"dead since step {born['step']}: its update was made with a gradient norm of inf" in dead["cause"]["evidence"]
    steps = [json.loads(line)["step"] for line in (tmp_path / "w" / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) < 120 and len(set(steps)) == len(steps)
    check = command("-m", "whynan", "check", "run", folder=tmp_path)
    compare(checked, check.stdout + check.stderr)
    assert f"inf at step {born['step']}, nan from step {born['step'] + 1} on" in " ".join(check.stdout.split())


def test_joint_diffusion_in_float16_dies_in_the_optimizer_at_step_0(tmp_path: Path) -> None:
    """Loss and gradients are finite and the rate is 0: Adam's eps is 0 in float16."""
    run = Watched("joint_diffusion", ["train.py", "--out", str(tmp_path / "out"), "--dtype", "float16", "--steps", "2"], tmp_path / "w", ("--policy", "stop"))
    incident = run["WN604"]
    assert incident["step"] == 0 and incident["origin"]["code"] == "optimizer.step()" and "eps=1e-4" in incident["remedies"][0]["diff"]


def test_joint_diffusion_recovers_by_rollback_without_a_change(tmp_path: Path, shown: Shown) -> None:
    """The failing program itself is brought to the end, by going back and on with a lower rate."""
    case = case_of("joint_diffusion")
    run = Watched("joint_diffusion", arguments(case, "failing", tmp_path / "out"), tmp_path / "w", tuple(case["recovery"]["options"]))
    assert run.done.returncode == 0 and "rolled back" in {i["action"]["taken"] for i in run.incidents}
    assert quality(run.done.stdout) <= case["recovery"]["at_most"]
    compare(shown("docs/casebook/joint_diffusion.md")[0], run.printed)


def test_settings_that_are_not_in_effect_are_said() -> None:
    """A flag that is not handed on and a number that no code reads."""
    told = " ".join(command("-m", "whynan", "doctor", CASES / "joint_diffusion").stdout.split())
    assert "`qk_rmsnorm: true` does not reach `Stream`" in told and "qk_rmsnorm=False holds" in told
    assert "`gradient_accumulation_steps: 4` is set and no code reads it" in told
    assert "`learning_rate" not in told and "`dim" not in told


def test_the_blank_image_is_named_and_the_silent_death_does_not_come(tmp_path: Path, shown: Shown) -> None:
    """With the old fix one NaN row makes every prior NaN and the loss 0.0 for ever; under whynan the batch is skipped and named."""
    case, name = case_of("clustering_heads"), "clustering_heads"
    plain, silent, line, told = shown(f"docs/casebook/{name}.md")
    words = [*[w.replace("{out}", str(tmp_path / "out")) for w in case["silent"]["failing"]], "--steps", "41"]
    assert shlex.split(plain)[1:] == shlex.split(line)[2:] == [w.replace(str(tmp_path / "out"), "run") for w in words]
    alone = command(*words, folder=CASES / name)
    compare(silent, alone.stdout)
    run = Watched(name, words, tmp_path / "w")
    before, after = told.split("step 40", 1)
    compare(before, run.done.stderr)
    compare(f"step 40{after}", run.printed)
    assert run["WN701"]["symptom"] == {"place": "buffer", "kind": "nan", "name": "prior", "detail": "2 tensors"} or run["WN701"]["symptom"]["name"] == "prior"
    assert "step 40 loss 0.0000" not in run.done.stdout and "step 40 loss" in run.done.stdout
    check = " ".join(command("-m", "whynan", "check", tmp_path / "out" / "features.pt").stdout.split())
    assert "417" in check and "WN701" in check


def test_the_poisoned_plate_checkpoints_are_moved_aside_and_the_healthy_one_resumes(out: Path, tmp_path: Path, shown: Shown) -> None:
    """Unwatched, the weights stay finite, the running statistics die and are saved; quarantine leaves the last healthy one."""
    case, name = case_of("hyper_connections"), "hyper_connections"
    page = f"docs/casebook/{name}.md"
    lines, printed, staged, checked, expected = shown(page)
    assert [shlex.split(line)[1:] for line in lines.splitlines()] == [arguments(case, key, Path("run")) for key in ("before", "failing")]
    done = command(*arguments(case, "failing", out), folder=CASES / name)
    assert "wrong nan" in done.stdout
    compare(printed, done.stdout)
    (stages,) = [step.text for step in steps_of(ROOT / page) if step.name == "stages.toml"]
    (tmp_path / "stages.toml").write_text(stages)
    compare(staged, command("-m", "whynan", "check", "run/log.jsonl", "--expect", "stages.toml", folder=tmp_path).stdout)
    check = command("-m", "whynan", "check", "run", "--quarantine", "aside", folder=tmp_path)
    compare(checked, check.stdout + check.stderr)
    compare(expected, command("-m", "whynan", "check", "run/epoch-02.pt", "--expect", "lr=3e-3", folder=tmp_path).stdout)
    told = " ".join(check.stdout.split())
    assert "running_mean: 14 nan of 14 values (WN602)" in told and "WN601" not in told and "WN606" in told
    healthy = sorted(p.name for p in out.glob("*.pt"))
    assert f"last healthy: {healthy[-1]}" in told and "epoch-06.pt" in {p.name for p in (tmp_path / "aside").rglob("*.pt")}
    resumed = command("train.py", "--out", out, "--resume", out / healthy[-1], folder=CASES / name / "healed")
    assert good_enough(quality(resumed.stdout), case)


def test_the_plate_reader_fails_by_its_mechanism_on_a_cpu_that_rounds_otherwise(out: Path, tmp_path: Path) -> None:
    """With AVX2 alone last digits differ; the gate grows past the same limit, and the exponential is the origin."""
    case, name = case_of("hyper_connections"), "hyper_connections"
    run = Watched(name, arguments(case, "failing", out), tmp_path / "w", ("--policy", "stop"), **AVX2)
    incident = run[case["expected"]["code"]]
    assert case["expected"]["text"] in incident["origin"]["code"] and incident["remedies"][0]["result"] == "proven"


def test_the_plate_reader_stays_healthy_at_the_rate_that_is_configured(tmp_path: Path) -> None:
    """The failing program, started without the checkpoint: the loaded rate is the cause."""
    case = case_of("hyper_connections")
    done = command("train.py", "--out", tmp_path / "run", folder=CASES / "hyper_connections")
    assert "nan" not in done.stdout and good_enough(quality(done.stdout), case)


def test_the_plate_readers_rate_is_told_as_the_script_says_it(out: Path, tmp_path: Path) -> None:
    """OneCycleLR is given its largest rate: that one is compared with the loaded one, not the rate it begins with."""
    run = Watched("hyper_connections", [*arguments(case_of("hyper_connections"), "failing", out), "--until", "2", "--batches", "2"], tmp_path / "w")
    assert run["WN607"]["symptom"]["detail"] == "0.003 configured, 0.01 loaded"
