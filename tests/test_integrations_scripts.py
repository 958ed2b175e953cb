"""Scripts of each framework that know nothing of whynan: the exact line of the fault, and not a bit changed where there is none."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
os.environ["HF_HUB_OFFLINE"] = "1"

import contextlib
import importlib
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, Finished, Sandbox, Shown
from doc_blocks import compare

EXAMPLES = Path(__file__).parent.parent / "examples" / "frameworks"
NEEDS = {"trainer": "transformers", "lightning_module": "lightning.pytorch", "accelerate_loop": "accelerate", "ignite_engine": "ignite", "keras_fit": "keras"}
FAULTS = {
    "trainer": ("WN101", "loss", "loss = outputs.loss - 0.1 * torch.log(quality).mean()"),
    "lightning_module": ("WN104", "forward", "return x / x.norm(dim=1, keepdim=True)"),
    "nanogpt": ("WN401", "forward", "att = F.softmax(att, dim=-1)"),
    "accelerate_loop": ("WN501", "backward", "loss = torch.sqrt(distance).mean()"),
    "titan": ("WN402", "loss", "loss = loss / valid_tokens"),
    "ignite_engine": ("WN404", "loss", "loss = error / batch.var(0).sum()"),
    "keras_fit": ("WN101", "loss", "return ops.mean(ops.square(ops.log(target) - prediction))"),
}
BY_COMMAND = ("trainer", "lightning_module", "nanogpt", "accelerate_loop")
OWN_PAGE = ("nanogpt", "titan")  # quick: docs/integrations.md runs these itself


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """Load once here what the forked children need; Lightning puts a `torch.compile` of its own in place."""
    for name in NEEDS.values():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def copied(box: Sandbox, name: str) -> str:
    """A copy of an example where the page has it."""
    script = f"examples/frameworks/{name}.py"
    (box.folder / script).parent.mkdir(parents=True)
    shutil.copy(EXAMPLES / f"{name}.py", box.folder / script)
    return script


def with_fault(box: Sandbox, name: str, *words: str) -> Finished:
    if name in BY_COMMAND:
        return box.whynan(*words, env=ENVIRONMENT | {"HF_HUB_OFFLINE": "1"})
    return box.forked("run", "--run-dir", str(box.run_dir), *words)


@pytest.mark.parametrize("name", FAULTS)
def test_a_script_that_does_not_know_whynan_gets_the_exact_line(box: Sandbox, name: str, shown: Shown) -> None:
    """By the command of the page, which shows what is printed."""
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert "import whynan" not in source
    script = copied(box, name)
    command, output = shown("docs/integrations.md") if name not in OWN_PAGE else (f"whynan run {script} --fault", "")
    done = with_fault(box, name, *shlex.split(command)[2:])
    compare(output, done.err)
    code, phase, text = FAULTS[name]
    assert done.status == 0, done.err
    first = done.incidents[0]
    origin = first["origin"]
    assert (first["cause"]["code"], origin["phase"], origin["code"], origin["exact"]) == (code, phase, text, True), done.err
    assert (Path(origin["file"]).name, origin["line"]) == (f"{name}.py", next(n for n, line in enumerate(source.splitlines(), 1) if line.strip() == text))
    assert first["action"]["taken"] == "skipped"


@pytest.mark.parametrize("name", FAULTS)
def test_a_healthy_run_prints_the_same_number_with_and_without_watching(box: Sandbox, name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    script = str(EXAMPLES / f"{name}.py")

    def plain() -> int:
        os.chdir(box.folder)
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
        return 0

    expected = box.in_child(plain)
    watched = box.forked("run", "--run-dir", str(box.run_dir), script)
    assert (expected.status, watched.status) == (0, 0), watched.err + expected.err
    losses = [line for line in expected.out.splitlines() if line.startswith("loss ")]
    assert len(losses) == 1
    assert [line for line in watched.out.splitlines() if line.startswith("loss ")] == losses
    assert watched.incidents == []
    assert len(watched.metrics) >= 8


def test_accelerate_launch_starts_watched_ranks_that_agree(box: Sandbox, shown: Shown) -> None:
    pytest.importorskip("accelerate")
    copied(box, "accelerate_loop")
    (line,) = shown("docs/integrations.md")
    words = shlex.split(line.replace("whynan run", f"whynan run --run-dir {box.run_dir}"))
    assert words[0] == "accelerate"
    done = box._process([sys.executable, "-m", "accelerate.commands.accelerate_cli", *words[1:]], env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"})
    assert done.status == 0, done.err
    assert [(i["cause"]["code"], i["origin"]["code"], i["action"]["taken"]) for i in done.incidents] == [
        ("WN501", "loss = torch.sqrt(distance).mean()", "skipped"),
    ], done.err
    assert done.out.count("loss ") == 1


def test_watching_imports_no_framework(box: Sandbox) -> None:
    source = """
        import sys, torch, whynan
        with whynan.watch(torch.nn.Linear(1, 1), files=False):
            pass
        print(sorted({"transformers", "lightning", "pytorch_lightning", "accelerate", "ignite", "keras"} & set(sys.modules)))
    """
    assert box.python(str(box.write(source))).out == "[]\n"
