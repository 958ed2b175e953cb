"""`whynan doctor`: the page, what is known to be bad in a project, and that it works without torch."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, PYTHON

from whynan import __version__
from whynan.commands.main import main
from whynan.doctoring import installation
from whynan.doctoring.facts import Grade, Page, Remark
from whynan.doctoring.page import examine
from whynan.doctoring.project import read_project


def _remarks(tmp_path: Path, source: str, name: str = "train.py") -> list[Remark]:
    (tmp_path / name).write_text(source)
    return read_project(tmp_path)[0]


BAD = {
    "anomaly mode set": "import torch\ntorch.autograd.set_detect_anomaly(True)\n",
    "anomaly mode as a context": "import torch\nwith torch.autograd.detect_anomaly():\n    pass\n",
    "anomaly mode of a trainer": "import lightning\ntrainer = lightning.Trainer(max_epochs=3, detect_anomaly=True)\n",
    "the NaN filter of the Trainer": "from transformers import TrainingArguments\nargs = TrainingArguments('out', bf16=True)\n",
    "the NaN filter asked for": "from trl import SFTConfig\nargs = SFTConfig(logging_nan_inf_filter=True)\n",
    "a scaler beside bfloat16": "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    pass\nscaler = torch.amp.GradScaler()\n",
}
GOOD = {
    "anomaly mode off": "import torch\ntorch.autograd.set_detect_anomaly(False)\n",
    "anomaly mode by a flag": "import torch\ntorch.autograd.set_detect_anomaly(args.debug)\n",
    "the filter off": "from transformers import TrainingArguments\nargs = TrainingArguments('out', logging_nan_inf_filter=False)\n",
    "arguments from elsewhere": "from transformers import TrainingArguments\nargs = TrainingArguments(**config)\n",
    "a scaler beside float16": "import torch\nwith torch.autocast('cuda', dtype=torch.float16):\n    pass\nscaler = torch.amp.GradScaler()\n",
    "a scaler that is off": "import torch\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    pass\nscaler = torch.amp.GradScaler(enabled=False)\n",
    "a fused optimizer": "import torch\nopt = torch.optim.AdamW(p, fused=True)\nx = x.cuda()\n",
    "an optimizer on the CPU": "import torch\nopt = torch.optim.AdamW(p)\n",
    "a class of one's own": "opt = mylib.Adam(p)\nx = x.cuda()\n",
    "words in a string": 'text = "torch.autograd.set_detect_anomaly(True)"\n',
}
NOTED = {
    "an optimizer that is not fused on CUDA": "import torch\nopt = torch.optim.AdamW(p, lr=1e-3)\nmodel.to('cuda:0')\n",
    "flushed denormals": "import torch\ntorch.set_flush_denormal(True)\n",
    "half sums in half": "import torch\ntorch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True\n",
    "benchmark mode": "import torch\ntorch.backends.cudnn.benchmark = True\n",
}


@pytest.mark.parametrize("source", BAD.values(), ids=BAD)
def test_what_hides_or_multiplies_damage_is_bad_at_its_line(tmp_path: Path, source: str) -> None:
    found = [r for r in _remarks(tmp_path, source) if r.grade is Grade.BAD]
    assert len(found) == 1
    assert found[0].file.endswith("train.py")
    assert found[0].line == len(source.rstrip().splitlines()) or found[0].line == 2
    assert found[0].advice


@pytest.mark.parametrize("source", GOOD.values(), ids=GOOD)
def test_what_is_in_order_is_not_mentioned(tmp_path: Path, source: str) -> None:
    assert _remarks(tmp_path, source) == []


@pytest.mark.parametrize("source", NOTED.values(), ids=NOTED)
def test_what_is_worth_knowing_is_a_note_and_not_bad(tmp_path: Path, source: str) -> None:
    assert [r.grade for r in _remarks(tmp_path, source)] == [Grade.NOTE]


def test_a_project_with_something_bad_gives_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(BAD["anomaly mode set"])
    assert main(["doctor", "."]) == 1
    out = capsys.readouterr().out
    assert "bad: train.py:2: anomaly mode is left on" in out
    assert out.splitlines()[-1] == "1 source files read, 1 known to be bad"


def test_without_a_project_the_page_is_about_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for words in (__version__, torch.__version__, "types on cpu", "bfloat16", "determinism", "denormals"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BAD["the NaN filter of the Trainer"])
    assert main(["doctor", str(tmp_path), "--format", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["versions"]["whynan"] == __version__
    assert told["files"] == 1
    assert told["remarks"][0]["grade"] == "bad"


def test_a_path_that_is_not_there_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "nowhere/at/all"]) == 2
    assert capsys.readouterr().err == "whynan: no such file or folder: nowhere/at/all\n"


def test_files_that_cannot_be_read_are_one_line_each_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\nimport torch\ntorch.autograd.set_detect_anomaly(True)\n".encode("latin-1"))
    (tmp_path / "binary.py").write_bytes(b"\x00\xff\xfe" * 10)
    (tmp_path / "large.py").write_text("x = 1\n" * 500_000)
    (tmp_path / "notes.ipynb").write_text("{not json")
    (tmp_path / "loop").symlink_to(tmp_path)
    found, read = read_project(tmp_path)
    unread = {Path(r.file).name: r.text for r in found if r.grade is Grade.UNREAD}
    assert set(unread) == {"broken.py", "binary.py", "large.py", "notes.ipynb"}
    assert "line 1" in unread["broken.py"]
    assert all("\n" not in text for text in unread.values())
    assert [Path(r.file).name for r in found if r.grade is Grade.BAD] == ["latin.py"]
    assert read == 1


@pytest.mark.timeout(60)
def test_pipes_odd_notebooks_and_deep_nesting_are_one_line_each(tmp_path: Path) -> None:
    """A pipe is not waited for, a notebook of another shape and code nested past Python's limit stop nothing."""
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "list.ipynb").write_text("[1, 2]")
    (tmp_path / "number.ipynb").write_text('{"cells": 3}')
    (tmp_path / "deep.py").write_text("torch.optim" + ".f()" * 3000 + ".AdamW(p).cuda()\n")
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    (tmp_path / "bad.py").write_text("import torch\ntorch.autograd.set_detect_anomaly(True)\n")
    found, read = read_project(tmp_path)
    assert {Path(r.file).name for r in found if r.grade is Grade.UNREAD} == {"pipe.py", "list.ipynb", "number.ipynb", "deep.py", "gone.py"}
    assert ([Path(r.file).name for r in found if r.grade is Grade.BAD], read) == (["bad.py"], 1)


def test_a_notebook_is_read_without_its_magics(tmp_path: Path) -> None:
    cells = [{"cell_type": "markdown", "source": ["# text"]}, {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install x\n"]}]
    cells.append({"cell_type": "code", "source": ["import torch\n", "torch.autograd.set_detect_anomaly(True)"]})
    (tmp_path / "train.ipynb").write_text(json.dumps({"cells": cells}))
    assert [r.grade for r in read_project(tmp_path)[0]] == [Grade.BAD]


def test_virtual_environments_and_hidden_folders_are_left_out(tmp_path: Path) -> None:
    for folder in (".venv/lib", "node_modules/x", ".hidden", "site-packages"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "train.py").write_text(BAD["anomaly mode set"])
    assert read_project(tmp_path) == ([], 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "closed.py").write_text("x = 1\n")
    (tmp_path / "closed.py").chmod(0)
    assert [r.grade for r in read_project(tmp_path)[0]] == [Grade.UNREAD]


def test_number_types_are_tried_not_guessed() -> None:
    rows = dict(installation.devices(torch))
    assert "bfloat16 yes" in rows["types on cpu"]
    assert installation._tried(torch, "cpu", "float16") in ("yes", "stored only")
    assert installation._tried(torch, "meta", "float16") == "no"


def test_an_old_torch_is_known_to_be_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.4.1+cu121")
    found = installation.remarks(torch)
    assert [r.grade for r in found] == [Grade.BAD]
    assert "older than 2.9" in found[0].text


def test_flushed_denormals_are_noted() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        assert any("denormal" in r.text for r in installation.remarks(torch))
        assert dict(installation.settings(torch))["denormals"] == "flushed to zero"
    finally:
        torch.set_flush_denormal(False)


def test_the_page_without_torch_says_what_still_works() -> None:
    page = Page((("versions", installation.versions(None)), ("devices", installation.devices(None)), ("whynan", installation.abilities(None))))
    assert "needs torch" in repr(page)
    assert "explain, doctor, lint" in repr(page)


def test_it_runs_where_torch_is_not_installed(tmp_path: Path) -> None:
    """A finder that hides torch stands for an environment without it."""
    code = (
        "import sys\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name == 'torch' else find(name, package)\n"
        "from whynan.commands.main import main\n"
        "raise SystemExit(main(['doctor', '.']))\n"
    )
    (tmp_path / "train.py").write_text(BAD["the NaN filter of the Trainer"])
    done = subprocess.run([PYTHON, "-c", code], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "torch                 not installed" in done.stdout
    assert "train.py:2" in done.stdout


def test_examine_reads_nothing_without_a_path() -> None:
    page = examine(None)
    assert page.files == 0
    assert page.status == 0
