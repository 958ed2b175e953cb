"""`whynan check` as people use it: folders that grew by themselves, terminals that close, machines without torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ENVIRONMENT, PYTHON, hears_ctrl_c

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from checkpoint_files import write_trainer

import whynan
from whynan.commands.main import main
from whynan.errors import UsageError
from whynan.forensics.checkpoints import quarantine
from whynan.report.lines import WIDTH, wrap

COMMAND = [str(PYTHON), "-m", "whynan", "check"]
NAN = float("nan")


def save(path: Path, *values: float, **more: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"fc.weight": torch.tensor([[0.5, 1.0, *values]]), **more}, path)
    return path


def series(folder: Path, healthy: int = 3, bad: int = 2, name: str = "step{}.pt") -> Path:
    for i in range(1, healthy + bad + 1):
        save(folder / name.format(i), NAN if i > healthy else 0.1 * i)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_copy_of_a_bad_checkpoint_is_moved_aside_with_it(tmp_path: Path) -> None:
    """Whoever starts again from `last.pt` must not get what was put into quarantine under another name."""
    run = series(tmp_path / "run")
    shutil.copy(run / "step5.pt", run / "last.pt")
    report = whynan.check(run, quarantine=tmp_path / "aside")
    assert names(run) == ["step1.pt", "step2.pt", "step3.pt"] and names(tmp_path / "aside") == ["last.pt", "step4.pt", "step5.pt"]
    assert Path(report.histories[0].first_bad).name == "step4.pt"


def test_a_healthy_copy_is_said_and_not_counted(tmp_path: Path) -> None:
    run = series(tmp_path / "run", bad=0)
    shutil.copy(run / "step3.pt", run / "last.pt")
    (history,) = whynan.check(run).histories
    assert len(history.members) == 3 and history.notes == ("last.pt holds the same as step3.pt",)


def test_two_runs_in_one_folder_each_have_a_last_healthy_one(tmp_path: Path) -> None:
    series(tmp_path, healthy=2, bad=1, name="runA_step{}.pt")
    series(tmp_path, healthy=3, bad=0, name="runB_step{}.pt")
    (history,) = whynan.check(tmp_path).histories
    told = [n.split("; ")[1] for n in history.notes]
    assert told == ["last healthy of runA_step#.pt: runA_step2.pt", "last healthy of runB_step#.pt: runB_step3.pt"]
    assert history.story[0].endswith("(healthy until runA_step2.pt)")


def test_one_series_with_its_last_one_is_not_called_several(tmp_path: Path) -> None:
    series(tmp_path)
    save(tmp_path / "best.pt", 7.0)
    assert whynan.check(tmp_path).histories[0].notes == ()


def test_quarantine_twice_in_a_row_and_inside_the_folder(tmp_path: Path) -> None:
    """What was moved is not found again; a second one of the same name gets another."""
    run = series(tmp_path / "run")
    assert whynan.check(run, quarantine=run / "bad").status == 1
    assert whynan.check(run, quarantine=run / "bad").status == 0
    save(run / "step4.pt", NAN)
    whynan.check(run, quarantine=run / "bad")
    assert names(run) == ["bad", "step1.pt", "step2.pt", "step3.pt"] and names(run / "bad") == ["step4.2.pt", "step4.pt", "step5.pt"]


def test_quarantine_into_a_file_is_misuse(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = series(tmp_path / "run")
    assert main(["check", str(run), "--quarantine", str(run / "step1.pt")]) == 2
    assert "not a folder" in capfd.readouterr().err and len(names(run)) == 5


def test_a_path_that_is_named_twice_is_looked_at_once(tmp_path: Path) -> None:
    run = series(tmp_path / "run")
    report = whynan.check([run, f"{run}/", run / ".." / "run"], quarantine=tmp_path / "aside")
    assert len(report.histories) == 1 and not report.histories[0].notes


def test_links_that_lead_out_and_up_are_not_followed(tmp_path: Path) -> None:
    """A link to the folder above would bring in, and move aside, what nobody asked for."""
    series(tmp_path / "other")
    run = series(tmp_path / "run", bad=0)
    (run / "up").symlink_to("..")
    (run / "self").symlink_to("self")
    report = whynan.check(run, quarantine=tmp_path / "aside")
    assert report.status == 0 and len(names(tmp_path / "other")) == 5
    assert any("a link to a folder above it" in n for n in report.notes)


def test_a_folder_that_two_links_lead_to_is_looked_at_once(tmp_path: Path) -> None:
    series(tmp_path / "store", healthy=2, bad=0)
    for name in ("one", "two"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).symlink_to("../store")
    report = whynan.check(tmp_path / "run")
    assert len(report.histories) == 1 and any("a link to a folder that was looked at" in n for n in report.notes)


def test_names_with_control_characters_keep_to_their_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    odd = ["new\nline.pt", "esc\x1b[31m.pt", "tab\tbell\x07.pt", "üñí漢字.pt", "percent%0A,x:y.pt"]
    for i, name in enumerate(odd):
        save(tmp_path / name, NAN, float(i))
    for form in ("text", "github", "json"):
        assert main(["check", *(str(tmp_path / n) for n in odd), "--format", form]) == 1
        said = capfd.readouterr().out
        assert not any(c in said for c in "\x1b\x07\t") and "\nline.pt" not in said
        if form == "text":
            assert "new\\nline.pt" in said
    assert [Path(c["path"]).name for c in json.loads(said)["checked"]] == odd


def test_numbers_are_not_broken_at_the_end_of_a_line() -> None:
    for size in range(WIDTH):
        assert any("20 000" in line for line in wrap("x" * size + " 20 000 tensors"))


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_reader_that_stops_early_changes_nothing(tmp_path: Path, form: str) -> None:
    """`whynan check … | head` ends without a word, with the exit status of what was found."""
    torch.save({f"blocks.{i}.scale": torch.rand(2) for i in range(3000)}, tmp_path / "many.pt")
    with subprocess.Popen(
        [*COMMAND, str(tmp_path / "many.pt"), "--all", "--format", form], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as told:
        assert told.stdout is not None and told.stderr is not None
        told.stdout.read(10)
        told.stdout.close()
        assert told.stderr.read() == b"" and told.wait(60) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_report_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, str(save(tmp_path / "a.pt"))], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (2, "whynan: the report cannot be written: No space left on device\n")


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef rows():\n    print('ready', flush=True)\n    time.sleep(60)\n    yield 1.0\n")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*COMMAND, "slow:rows"], cwd=tmp_path, env=ENVIRONMENT, preexec_fn=hears_ctrl_c, **pipes) as told:  # type: ignore[call-overload]
        assert told.stdout is not None
        assert told.stdout.readline() == "ready\n"
        time.sleep(0.2)
        told.send_signal(signal.SIGINT)
        assert (told.wait(60), told.communicate()[1]) == (130, "whynan: interrupted\n")


def test_ctrl_c_while_moving_says_what_was_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    run, move = series(tmp_path / "run"), quarantine.move

    def stopped(source: Path, folder: Path) -> Path:
        if source.name == "step5.pt":
            raise KeyboardInterrupt
        return move(source, folder)

    monkeypatch.setattr(quarantine, "move", stopped)
    assert main(["check", str(run), "--quarantine", str(tmp_path / "aside")]) == 130
    assert capfd.readouterr().err == f"whynan: interrupted\nwhynan: {run / 'step4.pt'} was moved to {tmp_path / 'aside' / 'step4.pt'}\n"
    assert names(run) == ["step1.pt", "step2.pt", "step3.pt", "step5.pt"]


@pytest.mark.parametrize(
    ("option", "said"),
    [(["--range", "x=5:1"], "--range 'x=5:1'"), (["--range", "x=nan:1"], "--range 'x=nan:1'"), (["--expect", "lr=nan"], "--expect 'lr=nan'")],
)
def test_ranges_and_numbers_that_nothing_can_meet_are_misuse(tmp_path: Path, capfd: pytest.CaptureFixture[str], option: list[str], said: str) -> None:
    assert main(["check", str(save(tmp_path / "a.pt")), *option]) == 2
    assert said in capfd.readouterr().err


def test_a_folder_without_permission_is_not_said_to_be_missing(tmp_path: Path) -> None:
    """Root reads everything: its right to do so is taken away first, where that can be done."""
    save(tmp_path / "shut" / "a.pt")
    os.chmod(tmp_path / "shut", 0)
    try:
        drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
        if drop and not shutil.which("setpriv"):
            pytest.skip("setpriv is not installed")
        done = subprocess.run([*drop, *COMMAND, str(tmp_path / "shut" / "a.pt")], capture_output=True, text=True, env=ENVIRONMENT)
    finally:
        os.chmod(tmp_path / "shut", 0o755)
    if "Operation not permitted" in done.stderr:
        pytest.skip("rights cannot be given up here")
    assert done.returncode == 2 and done.stderr.endswith("a.pt: Permission denied\n")


def test_without_torch_and_numpy_checkpoints_are_read_all_the_same(tmp_path: Path) -> None:
    """Only comparing two of them needs torch, and says so."""
    series(tmp_path / "run", healthy=1, bad=1)
    program = (
        "import sys\nfor name in ('torch', 'numpy', 'pyarrow', 'fsspec'):\n    sys.modules[name] = None\n"
        "from whynan.commands.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    run = [sys.executable, "-c", program, "check", str(tmp_path / "run")]
    done = subprocess.run(run, capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 1 and "last healthy: step1.pt" in done.stdout
    done = subprocess.run([*run, "--against", str(tmp_path / "run")], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 2 and "comparing checkpoints needs torch; pip install torch" in done.stdout


def test_tensors_without_values_are_said_to_be_so() -> None:
    report = whynan.check({"a": torch.empty(3, device="meta"), "b": torch.ones(2)})
    assert report.ok and "1 tensor on the meta device, without values: not looked at" in repr(report)


@pytest.mark.parametrize("nothing", [None, 5, b"x", [], torch.float32])
def test_what_holds_nothing_is_misuse(nothing: object) -> None:
    with pytest.raises(UsageError, match="nothing to check in a"):
        whynan.check(nothing)


def test_a_chain_of_checkpoints_says_why_a_pair_was_not_compared(tmp_path: Path) -> None:
    save(tmp_path / "step1.pt")
    save(tmp_path / "step2.pt")
    save(tmp_path / "step3.pt", 2.0)
    said = repr(whynan.check(tmp_path, against=tmp_path))
    assert "step2.pt to step3.pt  fc.weight  shape [1, 2] to [1, 3]" in said


def trainer_folder(folder: Path, weights: str = "model.safetensors") -> Path:
    """The files of a Trainer checkpoint."""
    folder.parent.mkdir(exist_ok=True)
    write_trainer(folder)
    (folder / "model.safetensors").rename(folder / weights)
    return folder


@pytest.mark.parametrize("weights", ["model.safetensors", "adapter_model.safetensors", "my_own_weights.safetensors"])
def test_a_trainer_checkpoint_with_weights_is_healthy(tmp_path: Path, weights: str) -> None:
    assert whynan.check(trainer_folder(tmp_path / "checkpoint-500", weights)).ok


def test_a_trainer_checkpoint_that_lost_its_weights_is_not_the_last_healthy_one(tmp_path: Path) -> None:
    """Everything in it can be read; nobody can start from it."""
    trainer_folder(tmp_path / "checkpoint-100")
    (trainer_folder(tmp_path / "checkpoint-200") / "model.safetensors").unlink()
    report = whynan.check(tmp_path)
    assert Path(report.histories[0].last_healthy).name == "checkpoint-100"
    assert [str(f) for f in report.findings] == ["bad: no weights beside the trainer's state"]


def test_an_optimizer_alone_is_not_the_last_healthy_one(tmp_path: Path) -> None:
    """What a Trainer that was killed while it saved leaves behind; a folder of nothing but optimizers has a last one all the same."""
    trainer_folder(tmp_path / "run" / "checkpoint-100")
    whole = trainer_folder(tmp_path / "checkpoint-200")
    (tmp_path / "run" / "tmp-checkpoint-200").mkdir()
    shutil.copy(whole / "optimizer.pt", tmp_path / "run" / "tmp-checkpoint-200")
    assert Path(whynan.check(tmp_path / "run").histories[0].last_healthy).name == "checkpoint-100"
    for step in (1, 2):
        (tmp_path / "alone").mkdir(exist_ok=True)
        shutil.copy(whole / "optimizer.pt", tmp_path / "alone" / f"optimizer_{step}.pt")
    assert Path(whynan.check(tmp_path / "alone").histories[0].last_healthy).name == "optimizer_2.pt"


def test_a_pointer_of_git_lfs_says_what_to_do(tmp_path: Path) -> None:
    """What a clone without LFS leaves in the place of every weight."""
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1342\n")
    assert whynan.check(tmp_path / "model.safetensors").checked[0].unreadable == "a Git LFS pointer, not the file itself; fetch it with git lfs pull"


def test_weights_that_were_saved_with_numpy_may_be_all_zero(tmp_path: Path) -> None:
    """A column of data may not."""
    numpy = pytest.importorskip("numpy", reason="numpy is not installed")
    draw = numpy.random.default_rng(0)
    numpy.savez(tmp_path / "weights.npz", **{"layer1.weight": draw.normal(size=(16, 8)), "layer1.bias": numpy.zeros(16), "norm.weight": numpy.ones(16)})
    numpy.savez(tmp_path / "data.npz", x=draw.normal(size=(16, 8)), weight=numpy.zeros(16))
    assert whynan.check(tmp_path / "weights.npz").ok
    assert [f.place for f in whynan.check(tmp_path / "data.npz").findings] == ["weight"]


def test_the_suffix_of_old_lua_files_is_no_step(tmp_path: Path) -> None:
    assert whynan.check(save(tmp_path / "ckpt.t7", epoch=5)).checked[0].step == 5


def test_a_small_checkpoint_is_not_taken_for_rows_of_data(tmp_path: Path) -> None:
    """One square weight and a step: its names are those of a training, and a file that is not a checkpoint any more is told as bad."""
    for step in (1, 2, 3):
        torch.save({"model": {"w": torch.randn(50, 50)}, "step": step}, tmp_path / f"step_{step}.pt")
    (tmp_path / "step_4.pt").write_bytes(bytes(range(1, 256)) * 40)
    [history] = whynan.check(tmp_path).histories
    assert history.last_healthy.endswith("step_3.pt") and history.first_bad.endswith("step_4.pt")
    torch.save({"x": torch.randn(50, 8), "y": torch.randint(0, 3, (50,))}, tmp_path / "rows.pt")
    assert whynan.check(tmp_path / "rows.pt").checked[0].kind == "data"
