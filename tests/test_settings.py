"""`whynan doctor --settings`: recommended settings with their reasons, as a diff on the user's own file."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, PYTHON

import whynan
from whynan.commands.main import main
from whynan.doctoring.project import recommend_settings
from whynan.settings.layout import read_layout
from whynan.settings.meaning import Meaning, meaning_of
from whynan.settings.recommending import Recommended

DIVERGES = """\
import json
import torch, yaml
cfg = yaml.safe_load(open("config.yaml"))
o = cfg["optim"]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
opt = torch.optim.SGD(model.parameters(), lr=o["lr"])
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / max(1, o["warmup_steps"])))
mix = torch.randn(16, 16)
with open("log.jsonl", "w") as log:
    for step in range(o["steps"]):
        x = torch.randn(64, 16)
        loss = (model(x) - x @ mix).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o["max_grad_norm"] or float("inf"))
        row = {"step": step, "loss": loss.item(), "grad_norm": norm.item(), "lr": sched.get_last_lr()[0]}
        log.write(json.dumps(row) + "\\n")
        opt.step()
        sched.step()
print(loss.item())
"""
CONFIG = """\
# rates
optim:
  lr: 2.0        # found in a paper
  warmup_steps: 100
  max_grad_norm: 0   # off
  steps: 300
"""


def _log(path: Path, **curves: list[float]) -> Path:
    """Write a log of these curves."""
    rows = [{"step": i, **{name: values[i] for name, values in curves.items()}} for i in range(len(next(iter(curves.values()))))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _advice(tmp_path: Path, text: str, name: str = "config.yaml", code: str = "", run: Path | None = None) -> Recommended:
    (tmp_path / name).write_text(text)
    if code:
        (tmp_path / "train.py").write_text(code)
    return recommend_settings(tmp_path, [run] if run else [])


def _only(answer: Recommended) -> tuple[str, float | None, str]:
    """The key, value and reason of the one thing that is said."""
    (advice,) = (a for _, several in answer.files for a in several)
    return advice.key or (advice.setting.key if advice.setting else ""), advice.value, advice.reason


def _run(tmp_path: Path) -> float:
    done = subprocess.run([PYTHON, "train.py"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout)


def test_the_printed_diff_heals_a_training_that_diverged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured on the log of the failing run, applied by git, and the same program trains: comments and layout are kept."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(DIVERGES)
    (tmp_path / "config.yaml").write_text(CONFIG)
    before = _run(tmp_path)
    assert main(["doctor", "--settings", "--run", "log.jsonl"]) == 1
    printed = capsys.readouterr().out
    assert "the loss was lowest at step" in printed and "max_grad_norm: 0 -> " in printed
    subprocess.run(["git", "init", "-q", "."], check=True)
    subprocess.run(["git", "apply", "-p0", "-"], input=printed, text=True, check=True)
    text = (tmp_path / "config.yaml").read_text()
    assert re.search(r"(?m)^  lr: 0\.\d+        # found in a paper$", text) and "# rates\noptim:\n" in text
    assert _run(tmp_path) < 1 < 10 < before
    assert main(["doctor", "--settings", "--run", "log.jsonl"]) == 0, "what is well gets no advice"


FILES = {
    "config.yaml": ("train:\n  - lr: 1e-3\n    max_grad_norm: null   # c\n    fp16: true\n", "    max_grad_norm: 1   # c\n"),
    "config.toml": ('[optim]\nlr = 1e-3\ngrad_clip = 0.0 # c\nprecision = "bf16"', "grad_clip = 1.0 # c\n"),
    "config.json": ('{\n  "optimizer": {"lr": 0.001},\n  "gradient_clipping": 0,\n  "bf16": true\n}', '  "gradient_clipping": 1,\n'),
}


@pytest.mark.parametrize("tool", ["patch", "git"])
@pytest.mark.parametrize("name", FILES)
def test_diff_is_taken_by_patch_and_git_and_keeps_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    monkeypatch.chdir(tmp_path)
    text, line = FILES[name]
    printed = repr(_advice(tmp_path, text, name))
    if tool == "git":
        subprocess.run(["git", "init", "-q", "."], check=True)
    command = ["patch", "-p0"] if tool == "patch" else ["git", "apply", "-p0", "-"]
    subprocess.run(command, input=printed + "\n", text=True, check=True, capture_output=True)
    new = (tmp_path / name).read_text()
    assert line in new
    changed = [(a, b) for a, b in zip(text.splitlines(), new.splitlines(), strict=True) if a != b]
    assert len(changed) == 1, "one line differs"


PLAIN = {
    "bfloat16 without clipping": ("lr: 1e-4\nclip_grad_norm: 0\ndtype: bfloat16\n", "", ("clip_grad_norm", 1.0)),
    "16-mixed, clipping null": ("trainer:\n  precision: 16-mixed\n  gradient_clip_val: null\nlr: 1\n", "", ("gradient_clip_val", 1.0)),
    "eps that is 0 in float16": ("dtype: float16\noptimizer:\n  lr: 1e-3\n  eps: 1.0e-8\n", "", ("eps", 1e-4)),
    "Adam at a large rate at once": ("optimizer: adamw\nlr: 3e-3\nwarmup_steps: 0\nmax_steps: 5000\n", "", ("warmup_steps", 100.0)),
    "a warm-up longer than the run": ("lr: 1e-4\nwarmup_steps: 1000\nmax_steps: 400\n", "", ("warmup_steps", 20.0)),
    "accumulation that nobody reads": (
        "lr: 1e-4\nbatch_size: 8\naccumulate_grad_batches: 4\n",
        "print(c['lr'], c.batch_size)\n",
        ("accumulate_grad_batches", 1.0),
    ),
}


@pytest.mark.parametrize(("text", "code", "expected"), PLAIN.values(), ids=PLAIN)
def test_what_is_plainly_wrong_is_recommended_and_called_not_measured(tmp_path: Path, text: str, code: str, expected: tuple[str, float]) -> None:
    answer = _advice(tmp_path, text, code=code)
    assert _only(answer)[:2] == expected
    assert "(recommended, not measured)" in " ".join(repr(answer).replace("#  ", "").split())


FINE = {
    "float32 without clipping": "lr: 1e-4\nclip_grad_norm: 0\n",
    "clipping that is on": "lr: 1e-4\nmax_grad_norm: 1.0\nbf16: true\n",
    "eps under autocast": "fp16: true\noptimizer:\n  lr: 1e-3\n  eps: 1.0e-8\nmax_grad_norm: 1\n",
    "a PPO clip range": "lr: 1e-4\nclip_range: 0\nbf16: true\nmax_grad_norm: 0.5\n",
    "no warm-up at a small rate": "optimizer: adamw\nlr: 1e-5\nwarmup_steps: 0\n",
    "a rate by name": "lr: auto\n",
    "weights in a document": "lr: 1\ntext: |\n  max_grad_norm: 0\n  dtype: bfloat16\n",
}


@pytest.mark.parametrize("text", FINE.values(), ids=FINE)
def test_settings_that_are_fine_get_no_advice(tmp_path: Path, text: str) -> None:
    answer = _advice(tmp_path, text)
    assert answer.status == 0 and not answer.diff and "nothing to recommend" in repr(answer)


def _falling(n: int = 200) -> list[float]:
    return [3.0 + math.exp(-i / 30) for i in range(n)]


def test_clip_that_never_acts_is_set_by_the_norms_of_the_run(tmp_path: Path) -> None:
    norms = [0.8 + 0.01 * (i % 50) for i in range(200)]
    run = _log(tmp_path / "log.jsonl", loss=_falling(), grad_norm=norms)
    key, value, reason = _only(_advice(tmp_path, "lr: 1e-4\nmax_grad_norm: 100\n", run=run))
    assert (key, value) == ("max_grad_norm", 2.0)
    assert "1.045 in the median" in reason and "it never acted" in reason


def test_missing_clip_is_added_under_the_name_the_code_reads(tmp_path: Path) -> None:
    run = _log(tmp_path / "log.jsonl", loss=_falling(), grad_norm=[0.9] * 200)
    code = "import torch\ntorch.nn.utils.clip_grad_norm_(p, cfg.get('max_grad_norm', 1e9))\n"
    answer = _advice(tmp_path, "training:\n  lr: 1e-4  # rate\n", code=code, run=run)
    assert _only(answer)[:2] == ("max_grad_norm", 1.0)
    assert "+  max_grad_norm: 1.0\n   lr: 1e-4  # rate\n" in answer.diff


def test_where_no_code_could_read_a_clip_none_is_added(tmp_path: Path) -> None:
    run = _log(tmp_path / "log.jsonl", loss=_falling(), grad_norm=[0.9] * 200)
    answer = _advice(tmp_path, "lr: 1e-4\n", code="opt.step(cfg['lr'])\n", run=run)
    assert not answer.diff and "clip_grad_norm_(model.parameters(), 1) before the step" in " ".join(repr(answer).replace("#  ", "").split())


@pytest.mark.parametrize(("setting", "value"), [("warmup_steps: 10", 50.0), ("warmup_ratio: 0.001", 0.05)])
def test_warm_up_shorter_than_the_fall_of_the_norms_is_made_longer(tmp_path: Path, setting: str, value: float) -> None:
    norms = [1.0 + 40 * math.exp(-i / 8) for i in range(200)]
    run = _log(tmp_path / "log.jsonl", loss=_falling(), grad_norm=norms)
    answer = _advice(tmp_path, f"lr: 1e-4\nmax_grad_norm: 1.0\nmax_steps: 1000\n{setting}\n", run=run)
    assert _only(answer)[1] == value and "calm from step" in _only(answer)[2]


def test_terms_of_one_weight_that_differ_by_thousands_are_weighed(tmp_path: Path) -> None:
    terms = {"train/recon_loss": [4000.0] * 100, "train/kl_loss": [0.5] * 100}
    run = _log(tmp_path / "log.jsonl", loss=[4000.5] * 100, **terms)
    key, value, reason = _only(_advice(tmp_path, "lr: 1e-4\nrecon_weight: 1.0\nkl_weight: 1.0\n", run=run))
    assert (key, value) == ("recon_weight", 0.002) and "changes the objective" in reason
    assert _advice(tmp_path, "lr: 1e-4\nrecon_weight: 1.0\nkl_weight: 0.01\n", run=run).status == 0, "somebody has chosen these"


def test_noise_of_tiny_batches_asks_for_accumulation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    norms = torch.exp(torch.randn(200) * 1.5).tolist()
    run = _log(tmp_path / "log.jsonl", loss=_falling(), grad_norm=norms)
    text = "lr: 1e-4\nmax_grad_norm: 50\nbatch_size: 1\ngradient_accumulation_steps: 2\n"
    assert _only(_advice(tmp_path, text, run=run))[:2] == ("gradient_accumulation_steps", 8.0)


def test_rate_in_the_log_above_the_configured_one_is_said_and_not_changed(tmp_path: Path) -> None:
    run = _log(tmp_path / "log.jsonl", loss=_falling(), lr=[4.92e-4] * 200)
    answer = _advice(tmp_path, "lr: 1e-4\n", run=run)
    assert "the log shows 0.000492 at step 0" in _only(answer)[2] and not answer.diff


@pytest.mark.parametrize("curve", [[2.0 + 0.3 * math.sin(i * 1.7) for i in range(300)], _falling(), [5.0] * 60, [0.0] * 60])
def test_a_loss_that_does_not_rise_leaves_the_rate_alone(tmp_path: Path, curve: list[float]) -> None:
    run = _log(tmp_path / "log.jsonl", loss=curve, lr=[1e-4] * len(curve))
    assert _advice(tmp_path, "lr: 1e-4\n", run=run).status == 0


def test_a_run_that_went_well_without_a_warm_up_needs_none(tmp_path: Path) -> None:
    text = "optimizer: adamw\nlr: 3e-3\nwarmup_steps: 0\n"
    assert _advice(tmp_path, text).status == 1
    run = _log(tmp_path / "log.jsonl", loss=_falling())
    assert _advice(tmp_path, text, run=run).status == 0


def test_a_log_in_json_is_not_taken_for_settings(tmp_path: Path) -> None:
    history = [{"step": s, "loss": 1.0, "learning_rate": 1e-3, "grad_norm": 1.0} for s in range(30)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history, "max_grad_norm": 0, "bf16": True}))
    answer = _advice(tmp_path, "lr: 1e-3\n")
    assert [layout.file.name for layout, _ in answer.files] == ["config.yaml"]


def test_an_arithmetic_incident_is_not_blamed_on_settings(tmp_path: Path) -> None:
    """A run directory of whynan: the incident is named, and that settings only delay it."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with whynan.watch(model, optimizer, run_dir=tmp_path / "run") as guard:
        for step in range(30):
            x = torch.ones(8, 4) * (step < 25)
            loss = torch.sqrt(((x @ model.weight.T) ** 2).sum(-1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if guard.incidents:
                break
    (tmp_path / "config.yaml").write_text("lr: 0.01\n")
    said = " ".join(repr(recommend_settings(tmp_path / "config.yaml", [tmp_path / "run"])).replace("#  ", "").split())
    assert "The incident at step 25 (WN501" in said and "settings can delay it, not prevent it" in said


NAMES = {
    "hydra": ("optimizer:\n  _target_: torch.optim.AdamW\n  lr: 1e-3\n", "lr", Meaning.RATE),
    "transformers": ('{"learning_rate": 5e-5, "max_grad_norm": 1.0}', "max_grad_norm", Meaning.CLIP),
    "deepspeed": ('{"scheduler": {"params": {"warmup_num_steps": 100}}}', "warmup_num_steps", Meaning.WARMUP_STEPS),
    "lightning": ("trainer: {accumulate_grad_batches: 4}\n", "accumulate_grad_batches", Meaning.ACCUMULATION),
    "onecycle": ("scheduler:\n  pct_start: 0.3\n", "pct_start", Meaning.WARMUP_RATIO),
    "fairseq": ("optimization:\n  clip_norm: 0.0\n", "clip_norm", Meaning.CLIP),
    "not the smallest rate": ("min_lr: 1e-6\n", "min_lr", None),
    "not weight decay": ("weight_decay: 0.1\n", "weight_decay", None),
    "not a value clip": ("clip_grad_value: 0.1\n", "clip_grad_value", None),
    "not a rate of dropping": ("drop_rate: 0.1\n", "drop_rate", None),
}


@pytest.mark.parametrize(("text", "key", "meaning"), NAMES.values(), ids=NAMES)
def test_settings_are_known_by_meaning(tmp_path: Path, text: str, key: str, meaning: Meaning | None) -> None:
    file = tmp_path / ("c.json" if text.startswith("{") else "c.yaml")
    file.write_text(text)
    layout = read_layout(file)
    assert layout is not None
    assert [meaning_of(s) for s in layout.settings if s.key == key] == [meaning]
    assert all(layout.lines[s.line][s.start : s.end] == s.text for s in layout.settings)


MISUSE = {
    "no settings": (["doctor", "--settings", "none.yaml"], "none.yaml: no learning rate and no clipping in it"),
    "an empty folder": (["doctor", "--settings", "empty"], "no file of settings with a learning rate there"),
    "a run that is not there": (["doctor", "--settings", "good.yaml", "--run", "gone"], "--run gone: no such file or folder"),
    "a run without numbers": (["doctor", "--settings", "good.yaml", "--run", "empty"], "--run empty: no metrics.jsonl and no training log in it"),
    "a log that is none": (["doctor", "--settings", "good.yaml", "--run", "none.yaml"], "--run none.yaml: no training log"),
    "a run without settings": (["doctor", "--run", "empty"], "--run goes with --settings"),
}


@pytest.mark.parametrize(("argv", "line"), MISUSE.values(), ids=MISUSE)
def test_misuse_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "none.yaml").write_text("a: b\n")
    (tmp_path / "good.yaml").write_text("lr: 1e-3\n")
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1


def test_json_holds_advice_and_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("lr: 1e-4\nmax_grad_norm: 0\nbf16: true\n")
    assert main(["doctor", "--settings", "--format", "json", "c.yaml"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["advice"][0]["key"] == "max_grad_norm" and told["advice"][0]["new"] == "1" and told["diff"].startswith("--- c.yaml\n+++ c.yaml\n")


@pytest.mark.parametrize("text", ["", "\x00\x01", "{" * 5000, "a: [" * 300, "lr: 1e-3\n- - - b\n  : : :\n", "lr = = 3\n[[[\n", '{"lr": 1e-3, '])
@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
def test_a_broken_file_never_raises(tmp_path: Path, text: str, suffix: str) -> None:
    file = tmp_path / f"c.{suffix}"
    file.write_text(text)
    layout = read_layout(file)
    assert layout is not None
    assert all(layout.lines[s.line][s.start : s.end] == s.text for s in layout.settings)
