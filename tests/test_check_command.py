"""`whynan check` and its report: exit status, the three formats, what is printed and what is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import Hostile, Training, cut, nan_weight, save_series
from conftest import ENVIRONMENT, PYTHON, Sandbox
from safetensors.torch import save_file

import whynan
from whynan.commands.main import main
from whynan.commands.progress import Bar
from whynan.forensics.findings import Change, Checked, Comparison, Finding, History, Kind, Report, Severity
from whynan.records import TensorStats
from whynan.report import annotations, checks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_series(tmp_path / "run", 5, {4: nan_weight, 5: nan_weight})


def strict(text: str) -> Any:
    """Read JSON as a strict reader does."""

    def refuse(name: str) -> Any:
        raise ValueError(f"bare {name}")

    return json.loads(text, parse_constant=refuse)


def test_exit_status_says_what_was_found(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """0 nothing, 1 findings, 2 a named path that cannot be read."""
    assert main(["check", str(folder / "step-00001.pt")]) == 0
    assert main(["check", str(folder / "step-00004.pt")]) == 1
    assert main(["check", str(folder)]) == 1
    cut(folder / "step-00004.pt")
    assert main(["check", str(folder)]) == 1
    assert main(["check", str(folder / "step-00004.pt")]) == 2
    assert main(["check", str(folder / "step-00004.pt"), str(folder / "step-00005.pt")]) == 2
    assert "step-00005.pt must not be used as it is" in capfd.readouterr().out.splitlines()[-2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.pt"], "nowhere.pt: no such file or folder"),
        ([], "Missing argument 'PATH...'."),
        (["x", "--expect", "lr"], "--expect 'lr': write NAME=NUMBER, for example lr=1e-4"),
        (["x", "--expect", "lr=fast"], "--expect 'lr=fast': write NAME=NUMBER, for example lr=1e-4"),
        (["x", "--range", "tokens=3"], "--range 'tokens=3': write NAME=LOW:HIGH, for example tokens=0:151643"),
        (["x", "--dry-run"], "--dry-run goes with --quarantine DIR"),
        (["nofilesystem://x"], "nofilesystem://x: Protocol not known: nofilesystem"),
    ],
)
def test_misuse_is_one_line(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """With exit status 2, on stderr, and nothing on stdout."""
    monkeypatch.chdir(tmp_path)
    assert main(["check", *arguments]) == 2
    out, err = capfd.readouterr()
    assert (out, err) == ("", f"whynan: {said}\n")


def test_a_file_that_nobody_knows_is_said_to_be_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Named directly it is unreadable, with the others checked all the same."""
    (tmp_path / "x.unknown").write_bytes(b"\x00\x01\x02 nothing of ours")
    torch.save({"a.weight": torch.randn(3, 3)}, tmp_path / "a.pt")
    assert main(["check", str(tmp_path / "x.unknown"), str(tmp_path / "a.pt")]) == 2
    out = capfd.readouterr().out
    assert "nothing found" in out and "unreadable" in out


def test_a_path_that_is_not_there_is_said_before_anything_is_done(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A slip in the last of many paths costs no hour of reading, and moves nothing."""
    assert main(["check", str(folder), str(tmp_path / "nowhere"), "--quarantine", str(tmp_path / "aside")]) == 2
    assert capfd.readouterr().err.endswith("nowhere: no such file or folder\n") and not (tmp_path / "aside").exists()


def test_rows_in_a_folder_are_read_as_checkpoints_on_demand(tmp_path: Path) -> None:
    """--as checkpoint holds for what lies in a folder too."""
    for number in (1, 2):
        torch.save({"inputs": torch.randn(10, 3), "labels": torch.zeros(10)}, tmp_path / f"rows-{number}.pt")
    assert len(whynan.check(tmp_path, kind="checkpoint").histories[0].members) == 2


def test_a_folder_that_may_not_be_listed_takes_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others in it are checked."""
    (folder / "private").mkdir()
    listed = os.listdir

    def refuse(path: Any) -> list[str]:
        if str(path).endswith("private"):
            raise PermissionError(13, "Permission denied")
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    report = whynan.check(folder)
    assert report.notes == (f"{folder}/private: permission denied",) and len(report.histories[0].members) == 5


def test_an_empty_folder_is_said_to_be_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """There is nothing to check in it."""
    assert main(["check", str(tmp_path)]) == 2
    assert "no checkpoint, data set or log in it" in capfd.readouterr().out


def test_the_last_line_says_what_to_do(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Resume from the last healthy one, with the command that moves the others."""
    main(["check", str(folder)])
    assert capfd.readouterr().out.splitlines()[-2:] == [
        "whynan: last healthy: step-00003.pt; resume from it; to move the 2 bad aside:",
        f"        whynan check {folder} --quarantine DIR",
    ]


def test_quarantine_from_the_command_line(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--dry-run says what would be moved; without it, it is."""
    aside = tmp_path / "aside"
    assert main(["check", str(folder), "--quarantine", str(aside), "--dry-run"]) == 1
    assert "would be moved" in capfd.readouterr().out and not aside.exists()
    assert main(["check", str(folder), "--quarantine", str(aside)]) == 1
    out = capfd.readouterr().out
    assert "\nmoved:" in out and "would be moved" not in out
    assert sorted(p.name for p in aside.iterdir()) == ["step-00004.pt", "step-00005.pt"]


def test_no_line_is_wider_than_eighty_columns(folder: Path) -> None:
    """But for names that are longer themselves."""
    report = whynan.check(folder, against=folder)
    short = [line.replace(str(folder), "run") for line in repr(report).splitlines()]
    assert max(map(len, short)) <= 80


def test_json_is_strict_and_whole(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A schema, the status, every member and tensor; infinities are strings."""
    state = Training().run().state()
    state["model"]["head.weight"].fill_(float("inf"))
    torch.save(state, folder / "step-00006.pt")
    main(["check", str(folder), "--format", "json"])
    told = strict(capfd.readouterr().out)
    assert (told["schema"], told["status"]) == (1, 1)
    (history,) = told["histories"]
    assert history["last_healthy"].endswith("step-00003.pt") and len(history["members"]) == 6
    assert {f["code"] for m in history["members"] for f in m["findings"]} == {"WN601"}
    assert told == strict(json.dumps(whynan.check(folder).to_json(), allow_nan=False))


def test_github_gets_one_annotation_a_finding(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the file and a title; nothing where nothing was found."""
    main(["check", str(folder), "--format", "github"])
    assert capfd.readouterr().out.splitlines() == [
        f"::error file={folder}/step-0000{n}.pt,title=WN601 not-finite::model.head.weight: 1 nan of 40 values" for n in (4, 5)
    ]
    assert main(["check", str(folder / "step-00001.pt"), "--format", "github"]) == 0
    assert capfd.readouterr().out == ""


def test_annotations_cannot_be_forged_by_a_name() -> None:
    """Line ends, per cent, colons and commas are escaped; suspects are warnings; notes are not told; lines of text are given."""
    findings = (
        Finding(Severity.SUSPECT, "odd", "50%\n::error::forged", "a\r\nb", line=7),
        Finding(Severity.NOTE, "note", "nothing"),
    )
    told = annotations.github(Report((Checked("x:1,y\n.pt", findings=findings), Checked("cut.pt", unreadable="cut off"))))
    assert told.splitlines() == [
        "::warning file=x%3A1%2Cy%0A.pt,line=7,title=odd::a%0D%0Ab: 50%25%0A::error::forged",
        "::error file=cut.pt,title=cannot be read::cut off",
    ]


def test_names_in_a_file_do_not_steer_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Control characters are made visible."""
    torch.save({"a\x1b[2J\x07\u202eb.weight": torch.tensor([[float("nan"), 1.0]])}, tmp_path / "a.pt")
    main(["check", str(tmp_path / "a.pt")])
    out = capfd.readouterr().out
    assert "\\x1b[2J\\x07" in out and not set(out) & {"\x1b", "\x07", "\u202e"}


def test_markup_in_names_is_not_taken_for_colour(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Square brackets are printed as they are."""
    torch.save({"[red]a[/red].weight": torch.tensor([[float("nan"), 1.0]])}, tmp_path / "a.pt")
    main(["check", str(tmp_path / "a.pt")])
    assert "[red]a[/red].weight" in capfd.readouterr().out


def test_every_tensor_is_listed_on_demand(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--all shows the statistics; without it a healthy file takes two lines."""
    main(["check", str(folder / "step-00001.pt")])
    assert "model.norm.running_var" not in capfd.readouterr().out
    main(["check", str(folder / "step-00001.pt"), "--all"])
    assert "  model.stem.weight  f32[8, 3, 3, 3]  min " in capfd.readouterr().out


def test_many_findings_are_counted_after_the_first_few(tmp_path: Path) -> None:
    """--all lists them."""
    torch.save({f"l{i}.weight": torch.full((2, 2), float("nan")) for i in range(20)}, tmp_path / "a.pt")
    report = whynan.check(tmp_path / "a.pt")
    assert "and 14 more (14 bad); --all lists them" in repr(report)
    assert checks.text(report, everything=True).count("4 nan of 4 values") == 20


def test_expectations_from_the_command_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The learning rate that is stored and the one that was expected are both said."""
    assert main(["check", str(folder / "step-00001.pt"), "--expect", "lr=1e-3", "--expect", "step=1"]) == 0
    assert main(["check", str(folder / "step-00001.pt"), "--expect", "lr=1e-4"]) == 1
    out = " ".join(capfd.readouterr().out.split())
    assert "the learning rate starts from 0.001, 0.0001 was expected" in out and "whynan explain WN607" in out


def test_allowed_names_are_not_looked_at(folder: Path) -> None:
    """--allow takes a pattern."""
    assert main(["check", str(folder / "step-00004.pt"), "--allow", "model.head.*"]) == 0


def test_comparison_from_the_command_line(folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """--against lists the largest updates first; moments and counters are not layers."""
    monkeypatch.chdir(folder)
    assert main(["check", "step-00003.pt", "--against", "step-00001.pt"]) == 0
    out = capfd.readouterr().out
    assert "step-00003.pt against step-00001.pt" in out and "model.head.weight  largest change" in out and "exp_avg" not in out
    assert main(["check", "step-00003.pt", "--against", "nowhere"]) == 2


def test_nothing_in_a_file_is_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A hostile pickle is named as such, with exit status 1 and no trace of its command."""
    torch.save({"a.weight": torch.randn(3, 3), "x": Hostile(tmp_path / "witness")}, tmp_path / "a.pt")
    assert main(["check", str(tmp_path / "a.pt")]) == 1
    assert "would run code" in " ".join(capfd.readouterr().out.split()) and not (tmp_path / "witness").exists()


def test_as_checkpoint_takes_a_file_for_one(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """--as wins over what the content looks like."""
    save_file({"x": torch.randn(10, 3), "y": torch.randn(10)}, tmp_path / "rows.safetensors")
    assert main(["check", str(tmp_path / "rows.safetensors"), "--as", "checkpoint"]) == 0
    assert "checkpoint, safetensors" in capfd.readouterr().out


def test_data_and_checkpoints_are_told_apart_by_their_tensors(tmp_path: Path) -> None:
    """Rows of one length without names of weights are data; anything like a weight or a counter is a checkpoint."""
    from whynan.forensics.addresses import Place
    from whynan.forensics.checkpoints.opening import open_checkpoint
    from whynan.forensics.kinds import holds_data

    cases: dict[str, tuple[Any, bool]] = {
        "rows": ({"inputs": torch.randn(10, 3), "labels": torch.zeros(10)}, True),
        "one": (torch.randn(100, 4), True),
        "lengths": ({"inputs": torch.randn(10, 3), "labels": torch.zeros(9)}, False),
        "weights": ({"fc.weight": torch.randn(10, 3), "fc.bias": torch.randn(10)}, False),
        "optimizer": ({"a": torch.randn(10, 3), "param_groups": [{"lr": 1}]}, False),
        "single": ({"x": torch.randn(1, 3)}, False),
        "number": ({"x": torch.tensor(1.0)}, False),
    }
    for name, (state, expected) in cases.items():
        torch.save(state, tmp_path / f"{name}.pt")
        assert holds_data(open_checkpoint(Place.of(tmp_path / f"{name}.pt"))) is expected, name


def test_the_library_call_takes_states_modules_and_paths(folder: Path) -> None:
    """Its repr is the report."""
    assert whynan.check(torch.nn.Linear(2, 2)).ok
    assert whynan.check({"a": {"b.weight": torch.tensor([[float("inf")]])}}).findings[0].place == "a.b.weight"
    assert whynan.check([folder / "step-00001.pt", str(folder / "step-00002.pt")]).ok
    report = whynan.check(str(folder))
    assert "last healthy: step-00003.pt" in repr(report) and not report.ok and report.status == 1
    with pytest.raises(whynan.WhynanError, match="unexpected keyword"):
        whynan.check(folder, expects={"lr": 1})
    with pytest.raises(whynan.WhynanError, match="film"):
        whynan.check(folder, kind="film")


def test_the_command_starts_without_torch(box: Sandbox) -> None:
    """`whynan check --help` and a healthy safetensors file need no torch in the process."""
    save_file({"a.weight": torch.randn(3, 3)}, box.folder / "a.safetensors")
    probe = "import sys; from whynan.commands.main import main; status = main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(status)"
    done = box.python("-c", probe, "check", "--help")
    assert done.status == 0 and "--quarantine" in done.out and done.out.endswith("False\n")


def test_a_pipe_gets_no_colours_and_no_bar(folder: Path) -> None:
    """Neither does NO_COLOR on a terminal get colours."""
    done = subprocess.run([PYTHON, "-m", "whynan", "check", str(folder)], capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 1 and done.stderr == "" and "\x1b" not in done.stdout


def on_a_terminal(command: list[str], **environment: str) -> str:
    """Run a command with a terminal on both outputs."""
    import pty

    main_end, other_end = pty.openpty()
    with subprocess.Popen(command, stdout=other_end, stderr=other_end, env={**ENVIRONMENT, "TERM": "xterm", **environment}) as process:
        os.close(other_end)
        chunks = []
        while True:
            try:
                chunk = os.read(main_end, 65536)
            except OSError:
                break
            if not chunk:
                break
            chunks.append(chunk)
        process.wait()
    os.close(main_end)
    return b"".join(chunks).decode()


def test_colours_on_a_terminal_unless_they_are_not_wanted(folder: Path) -> None:
    """NO_COLOR is honoured."""
    command = [PYTHON, "-m", "whynan", "check", str(folder / "step-00004.pt")]
    assert "\x1b[31m" in on_a_terminal(command, NO_COLOR="")
    assert "\x1b[31m" not in on_a_terminal(command, NO_COLOR="1")


def test_the_bar_shows_only_for_long_work_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short work, a pipe and --no-progress show none; long work shows the rate."""
    clock = [0.0, 0.2, 5.0]
    monkeypatch.setattr("whynan.commands.progress.time.monotonic", lambda: clock.pop(0) if len(clock) > 1 else clock[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with Bar([], wanted=True) as bar:
        bar.tick(1 << 20)
        assert bar._shown is None
        bar.tick(1 << 20)
        assert bar._shown is not None
        assert bar._shown[0].tasks[0].completed == 2 << 20
    quiet = Bar([], wanted=False)
    quiet.tick(1)
    assert quiet._shown is None


def test_the_total_of_the_bar_is_the_size_of_what_is_read(folder: Path) -> None:
    """Files and folders are added up; an address has no total."""
    from whynan.commands.progress import _total

    sizes = sum(p.stat().st_size for p in folder.iterdir())
    assert _total([str(folder)]) == sizes
    assert _total([str(folder), str(folder / "step-00001.pt")]) == sizes + (folder / "step-00001.pt").stat().st_size
    assert _total(["s3://bucket/key", str(folder)]) is None


def test_the_worst_file_comes_first() -> None:
    """Unreadable, bad, suspect, healthy."""
    bad = Checked("bad.pt", findings=(Finding(Severity.BAD, "x", "y"),))
    suspect = Checked("suspect.pt", findings=(Finding(Severity.SUSPECT, "x", "y"),))
    order = [line.split()[0] for line in repr(Report((bad, Checked("cut.pt", unreadable="cut"), suspect, Checked("ok.pt")))).splitlines() if ".pt" in line]
    assert order[:4] == ["cut.pt", "bad.pt", "suspect.pt", "ok.pt"]


def test_the_text_of_a_report_reads_as_meant() -> None:
    """The whole form, once."""
    member = Checked("run/a-1.pt", Kind.CHECKPOINT, "torch zip", 1200, 1, (), (TensorStats("w", "float32", (2,), min=0.0, max=1.0),))
    broken = Checked("run/a-2.pt", Kind.CHECKPOINT, step=2, findings=(Finding(Severity.BAD, "not-finite", "2 nan of 4 values", "w", "WN601"),))
    history = History(
        "run",
        (member, broken),
        "run/a-1.pt",
        "run/a-2.pt",
        story=("a-2.pt: w: 2 nan of 4 values (healthy until a-1.pt)",),
        growth=("w grew 12x a checkpoint since step 0 (1 to 144)",),
        notes=("last.pt is a link to a-2.pt",),
    )
    pair = Comparison("run/a-2.pt", "run/a-1.pt", (Change("w", 0.5, 1.0), Change("v", 0.0, 0.0)), ("n",), ("g",))
    assert repr(Report((), (history,), (pair,), ("run: passed over 1 other file (x.txt)",))) == (
        "run  2 checkpoints, 1 bad\n"
        "  1  a-1.pt  ok\n"
        "  2  a-2.pt  bad      w: 2 nan of 4 values (WN601)\n"
        "first bad: a-2.pt: w: 2 nan of 4 values (healthy until a-1.pt)\n"
        "before it: w grew 12x a checkpoint since step 0 (1 to 144)\n"
        "note: last.pt is a link to a-2.pt\n"
        "\n"
        "run/a-2.pt against run/a-1.pt\n"
        "         0.5  w  largest change 1\n"
        "  unchanged 1: v\n"
        "  appeared 1: n\n"
        "  vanished 1: g\n"
        "\n"
        "note: run: passed over 1 other file (x.txt)\n"
        "\n"
        "whynan: last healthy: a-1.pt; resume from it; to move the 1 bad aside:\n"
        "        whynan check run --quarantine DIR"
    )


def test_an_expectation_that_nothing_could_meet_is_said(folder: Path) -> None:
    """A misspelt name does not pass for one that was met."""
    report = whynan.check(folder, expect={"lrr": 1.0, "lr": 1e-3})
    assert report.notes == ("--expect lrr: not stored in any checkpoint",)


def log_of(path: Path, bad: bool = False) -> Path:
    lines = [json.dumps({"step": i, "loss": 1.0 / (i + 1) if i < 6 or not bad else float("nan"), "grad_norm": 1.0}) for i in range(10)]
    path.write_text("\n".join(lines))
    return path


def test_a_plot_that_cannot_be_written_costs_no_report(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Misuse is told before anything is moved; what fails later comes after the report."""
    assert main(["check", str(folder), "--quarantine", str(tmp_path / "aside"), "--plot", str(tmp_path / "x.pdf")]) == 2
    assert capfd.readouterr() == ("", f"whynan: --plot {tmp_path / 'x.pdf'}: a curve is written as .svg or .png\n")
    assert not (tmp_path / "aside").exists()
    assert main(["check", str(folder), "--quarantine", str(tmp_path / "aside"), "--plot", str(tmp_path / "x.svg")]) == 2
    out, err = capfd.readouterr()
    assert "moved:" in out and "no log among what was checked" in err


def test_quarantine_is_a_local_folder(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """An address would become a folder called `s3:`."""
    monkeypatch.chdir(tmp_path)
    assert main(["check", str(folder), "--quarantine", "s3://bucket/bad"]) == 2
    assert "--quarantine s3://bucket/bad: a local folder" in capfd.readouterr().err and not (tmp_path / "s3:").exists()


def test_one_that_cannot_be_read_in_a_folder_is_a_finding(tmp_path: Path) -> None:
    """Alone in it or beside others; named itself it is a failure to do what was asked."""
    cut(save_series(tmp_path / "run", 1) / "step-00001.pt")
    report = whynan.check(tmp_path / "run")
    assert report.checked[0].unreadable and (report.status, report.ok) == (1, False)
    assert whynan.check([tmp_path / "run", tmp_path / "run" / "step-00001.pt"]).status == 2
    save_series(tmp_path / "more", 1)
    cut(tmp_path / "more" / "step-00001.pt")
    (tmp_path / "more" / "x.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert whynan.check(tmp_path / "more").status == 1
    (tmp_path / "none").mkdir()
    assert whynan.check(tmp_path / "none").status == 2


def test_no_line_is_wider_than_80_columns(tmp_path: Path) -> None:
    """Long reasons, many notes, every tensor, and names that would steer the terminal."""
    long = "model.encoder.layers.11.attention.self.query.weight"
    stats = TensorStats(f"{long}\x1b\x1b\x1b\x1b", "float32", (4096, 4096, 3), nan=12, posinf=345, neginf=6789, zeros=123456, min=-1.2345e-12, max=1.2345e12)
    member = Checked("run/" + "\x07" * 12 + "a.pt", Kind.CHECKPOINT, tensors=(stats,), unreadable="a reason that goes on and on " * 5)
    change = Change(long, 0.123456, 12345.678, "12345 values that are not finite left out, dtype float32 to bfloat16")
    other = Change(long, note="not compared: one of the two is a view that repeats its values, shape [1] to [2]")
    pairs = (Comparison("b.pt", "a.pt", (change, other)), Comparison("c.pt", "b.pt", (), unreadable="the reason is a long one, longer than a line " * 3))
    report = Report((member,), (History("run", (member, member)),), pairs[:1])
    for shown in (report, Report((), (), pairs[1:]), Report((), (), pairs)):
        assert max(len(line) for line in checks.text(shown, everything=True).splitlines()) <= 80


def test_a_state_is_neither_moved_nor_compared(tmp_path: Path) -> None:
    """What cannot be done is not passed over in silence."""
    for options in ({"against": "x.pt"}, {"quarantine": tmp_path}, {"dry_run": True}):
        with pytest.raises(whynan.WhynanError, match="go with paths"):
            whynan.check({"a.weight": torch.ones(2, 2)}, **options)
    with pytest.raises(whynan.WhynanError, match="nothing to check in a int"):
        whynan.check(123)


def test_a_comparison_that_fails_is_an_annotation(tmp_path: Path) -> None:
    """The exit status 2 of a job has its reason beside it."""
    for name in ("a.pt", "b.pt"):
        torch.save({"a.weight": torch.randn(2, 2)}, tmp_path / name)
    cut(tmp_path / "b.pt")
    said = annotations.github(whynan.check(tmp_path / "a.pt", against=tmp_path / "b.pt"))
    assert said.startswith(f"::error file={tmp_path / 'a.pt'},title=cannot be compared::cut short")


def test_several_plots_overwrite_nothing_that_was_not_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And --allow holds for them too."""
    one, two = log_of(tmp_path / "one.jsonl"), log_of(tmp_path / "two.jsonl")
    (tmp_path / "curve-2.svg").write_text("mine")
    assert main(["check", str(one), str(two), "--plot", str(tmp_path / "curve.svg"), "--allow", "grad_norm"]) == 0
    assert (tmp_path / "curve-2.svg").read_text() == "mine"
    assert capfd.readouterr().err.splitlines()[1] == f"whynan: {two} is drawn in {tmp_path / 'curve-3.svg'}"
    plain, allowed = tmp_path / "plain.svg", tmp_path / "curve.svg"
    assert main(["check", str(one), "--plot", str(plain)]) == 0
    assert "grad_norm" in plain.read_text() and "grad_norm" not in allowed.read_text()
