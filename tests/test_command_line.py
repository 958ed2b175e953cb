"""`whynan run`: a script runs as it does without whynan; misuse is one line and exit status 2."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import textwrap
import time
import zipapp
import zipfile
from pathlib import Path

import pytest
from conftest import ENVIRONMENT, PYTHON, Sandbox, hears_ctrl_c, strict_lines

SIGHT = """
    import atexit, json, os, pickle, sys

    class Kept:
        def __eq__(self, other):
            return type(other) is type(self)

    main = sys.modules["__main__"]
    atexit.register(lambda: print("said at exit"))
    print(json.dumps({
        "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "cwd": os.getcwd(),
        "package": globals().get("__package__"), "spec": __spec__ and __spec__.name, "doc": __doc__, "is main": main.__dict__ is globals(),
        "pickled": pickle.loads(pickle.dumps(Kept())) == Kept(), "input": sys.stdin.read(), "excepthook": sys.excepthook is sys.__excepthook__,
        "builtins": type(__builtins__).__name__, "inspected": __import__("inspect").getsource(Kept).splitlines()[0],
    }))
    print("to stderr", file=sys.stderr)
    sys.exit(7)
"""

TRAIN = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        x = torch.randn(8, 4)
        p = torch.sigmoid(model(x)) * (step != 2)
        optimizer.zero_grad()
        loss = -torch.log(p).mean()
        loss.backward()
        optimizer.step()
        print(step, loss.item())
"""


def same_as_python(box: Sandbox, *argv: str, **options: object) -> None:
    """Run twice and compare everything a caller can see."""
    plain, watched = box.python(*argv, **options), box.whynan(*argv, **options)
    assert (watched.out, watched.err, watched.status) == (plain.out, plain.err, plain.status)


def test_script_sees_what_python_gives_it(box: Sandbox) -> None:
    """Name, file, arguments, path, folder, stdin, pickling, atexit, both outputs and the status are as without whynan."""
    box.write(SIGHT, "inner/train.py")
    same_as_python(box, "inner/train.py", "--policy", "none", "-m", "x", "--run-dir=y", "--", "-h", "--help", "", input="text")


def test_module_sees_what_python_gives_it(box: Sandbox) -> None:
    """`-m package.module` with arguments that look like whynan's own behaves as `python -m` does."""
    box.write("", "package/__init__.py")
    box.write(SIGHT, "package/module.py")
    same_as_python(box, "-m", "package.module", "--in-a-row", "-m", "--policy", "stop", "--version")


def test_package_with_main_runs(box: Sandbox) -> None:
    """`-m package` runs its `__main__`, with the package's own name to import from."""
    box.write("WORD = 'inner'", "package/__init__.py")
    box.write("import sys\nfrom . import WORD\nprint(WORD, __name__, __package__, sys.argv[1:])", "package/__main__.py")
    done = box.forked("run", "-m", "package", "--policy")
    assert (done.out, done.err, done.status) == ("inner __main__ package ['--policy']\n", "", 0)


def test_folder_and_zip_application_run(box: Sandbox) -> None:
    """A folder with a `__main__`, and a zip file with one, see what `python` gives them."""
    box.write("WORD = 'beside'", "app/beside.py")
    box.write("import sys, beside\nprint(beside.WORD, sys.argv, sys.path[0], __name__, __file__, repr(__package__), __spec__.name)", "app/__main__.py")
    same_as_python(box, "app", "--policy", "x")
    zipapp.create_archive(box.folder / "app", box.folder / "app.pyz")
    same_as_python(box, "app.pyz", "--policy", "x")


def test_script_with_a_syntax_error(box: Sandbox) -> None:
    """It ends as with `python`: status 1, and Python's own words with the line."""
    box.write("a = 1\nb = 2\ndef broken(:\n", "broken.py")
    same_as_python(box, "broken.py")


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", b"name = '\xe9t\xe9'\n"])
def test_script_that_is_not_text(box: Sandbox, content: bytes) -> None:
    """It ends with status 1 and Python's SyntaxError; nothing is run or written."""
    (box.folder / "image.py").write_bytes(content)
    done = box.forked("run", "image.py")
    assert (done.status, done.out) == (1, "")
    assert "\nSyntaxError: " in f"\n{done.err}"
    assert "Traceback" not in done.err
    assert not (box.folder / "whynan-runs").exists()


@pytest.mark.parametrize("library", ["click", "safetensors"])
def test_module_beside_the_script_named_as_a_library_of_ours(box: Sandbox, library: str) -> None:
    """A file of the script's folder wins over a library that only whynan has loaded."""
    box.write("WORD = 'mine'", f"{library}.py")
    box.write(f"import {library}\nprint({library}.WORD, {library}.__file__)", "train.py")
    same_as_python(box, "train.py")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run"], "give a script"),
        (["run", "missing.py"], "missing.py"),
        (["run", "folder"], "folder is a directory"),
        (["run", "empty.zip"], "empty.zip is a zip file without `__main__`"),
        (["run", "-m", "no_such_module"], "no_such_module"),
        (["run", "-m", "no.such.module"], "no.such.module"),
        (["run", "-m", "folder"], "folder"),
        (["run", "--policy", "pray", "fine.py"], "pray"),
        (["run", "--in-a-row", "-1", "fine.py"], "-1"),
        (["run", "--in-total", "many", "fine.py"], "many"),
        (["run", "--run-dir", "fine.py", "fine.py"], "fine.py"),
        (["run", "--run-dir"], "run-dir"),
        (["run", "--no-such-option", "fine.py"], "--no-such-option"),
        (["sprint"], "sprint"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_misuse_is_one_line_and_status_2(box: Sandbox, argv: list[str], said: str) -> None:
    """Wrong arguments and unreadable scripts: one line that names the value, no traceback, nothing run, nothing written."""
    (box.folder / "folder").mkdir()
    box.write("print('ran')", "fine.py")
    zipfile.ZipFile(box.folder / "empty.zip", "w").close()
    done = box.forked(*argv)
    assert done.status == 2
    assert done.out == ""
    assert re.fullmatch(r"whynan: [^\n]+\n", done.err), done.err
    assert said in done.err
    assert not (box.folder / "whynan-runs").exists()


def test_misuse_in_a_fresh_process(box: Sandbox) -> None:
    """The status and the single line also come out of `python -m whynan` itself."""
    done = box.whynan("missing.py")
    assert (done.out, done.err.count("\n"), done.status) == ("", 1, 2)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["run", "--help"], ["explain", "--help"], ["--version"]])
def test_help_and_version(box: Sandbox, argv: list[str]) -> None:
    """Help and version go to stdout with status 0."""
    done = box.forked(*argv)
    assert done.status == 0
    assert done.err == ""
    assert "whynan" in done.out


RAISES = """
    import torch

    class Layer(torch.nn.Module):
        def forward(self, x):
            return self.inner(x)

        def inner(self, x):
            raise KeyError("layer")

    def train():
        try:
            Layer()(torch.ones(2))
        except KeyError as error:
            raise ValueError("two words") from error

    print("before")
    try:
        train()
    except ValueError:
        torch.nn.Linear(2, 2)(torch.ones(3))
"""


def test_own_exception_reads_as_without_whynan(box: Sandbox) -> None:
    """A script that raises, also through modules and chained, leaves the same traceback and status 1: no frame of whynan."""
    box.write(RAISES)
    plain, watched = box.python("train.py"), box.whynan("train.py")
    assert watched.status == plain.status == 1
    assert watched.out == plain.out
    assert f"{os.sep}whynan{os.sep}" not in watched.err
    assert without_diagnosis(watched.err) == plain.err


def test_excepthook_of_the_script_sees_its_own_frames(box: Sandbox) -> None:
    """A hook that the script set is given the traceback it would have without whynan."""
    done = box.watched("""
        import sys, traceback

        def hook(kind, error, trace):
            print(kind.__name__, [f.name for f in traceback.extract_tb(trace)], error.__traceback__ is trace)

        def fail():
            raise ValueError

        sys.excepthook = hook
        fail()
    """)
    assert (done.out, done.status) == ("ValueError ['<module>', 'fail'] True\n", 1)


def without_diagnosis(text: str) -> str:
    """Return what the program itself wrote on stderr: the traceback without what whynan says beside it."""
    return text[text.index("Traceback") :].split("\nwhynan:")[0]


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit('four words of text')",
        "input()",
        "import click; raise click.UsageError('of the script')",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    ],
    ids=["text", "end of input", "click error", "signal"],
)
def test_ways_to_end(box: Sandbox, program: str) -> None:
    """However a script ends (a text, end of input, an exception of click's, a signal), it is as without whynan."""
    box.write(program)
    same_as_python(box, "train.py")


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(0)", 0),
        ("raise SystemExit", 0),
        ("import click\n@click.command()\n@click.option('--n', type=int)\ndef go(n): print(n)\ngo(['--n', 'x'])", 2),
        ("import click\n@click.command()\ndef go(): raise click.exceptions.Exit(9)\ngo([])", 9),
    ],
)
def test_exit_status_is_the_scripts(box: Sandbox, program: str, status: int) -> None:
    """`sys.exit` of every kind, also by way of a click program, gives its own status and no word from whynan."""
    done = box.watched(program)
    assert done.status == status
    assert "whynan" not in done.err


LOOP = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    while True:
        x = torch.randn(8, 4)
        if step == 2:
            x[1, 1] = float("nan")
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        step += 1
        if step == 100:
            print("ready", flush=True)
"""


def interrupted(box: Sandbox, command: list[str]) -> tuple[int, str]:
    """Start a program, send Ctrl-C once it says that it is ready, return its status and stderr."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=box.folder, env=ENVIRONMENT, preexec_fn=hears_ctrl_c, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.stderr.read() if process.stderr else ""
        time.sleep(0.05)  # somewhere in the middle
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        return process.returncode, err


def test_interrupt_leaves_complete_files(box: Sandbox) -> None:
    """Ctrl-C in the middle: the exit status of plain python, the script's own traceback, all files whole and complete."""
    box.write(LOOP)
    plain, _ = interrupted(box, [PYTHON, "train.py"])
    status, err = interrupted(box, [PYTHON, "-m", "whynan", "run", "--run-dir", str(box.run_dir), "train.py"])
    assert status == plain == -signal.SIGINT
    assert err.rstrip().splitlines()[-1].endswith("KeyboardInterrupt")
    assert f"{os.sep}whynan{os.sep}" not in err
    assert "Abort" not in err
    metrics = strict_lines(box.run_dir / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(len(metrics)))
    assert len(metrics) >= 100
    assert [i["step"] for i in strict_lines(box.run_dir / "incidents.jsonl")] == [2]
    assert (box.run_dir / "report.md").read_text(encoding="utf-8").rstrip()


def test_fifty_megabytes_of_output(box: Sandbox) -> None:
    """A script that prints a lot through a pipe loses and gains nothing."""
    path = box.write("import sys\nfor n in range(50):\n    sys.stdout.write(f'{n:07d} ' * 131072)\n")
    command = [PYTHON, "-m", "whynan", "run", "--run-dir", str(box.run_dir), str(path)]
    done = subprocess.run(command, cwd=box.folder, env=ENVIRONMENT, stdout=subprocess.PIPE, check=True, timeout=120)
    expected = hashlib.sha256()
    for n in range(50):
        expected.update(f"{n:07d} ".encode() * 131072)
    assert len(done.stdout) == 50 << 20
    assert hashlib.sha256(done.stdout).digest() == expected.digest()


def test_reader_that_goes_away(box: Sandbox) -> None:
    """`whynan run … | head` ends as `python … | head` does: same status, same last line on stderr."""
    box.write("while True: print('x' * 1000)")

    def headed(command: list[str]) -> tuple[int, str]:
        with subprocess.Popen(command, cwd=box.folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            err = process.stderr.read()
            return process.wait(60), err

    plain = headed([PYTHON, "train.py"])
    assert headed([PYTHON, "-m", "whynan", "run", "train.py"]) == plain


def test_stdout_belongs_to_the_script(box: Sandbox) -> None:
    """A run with an incident prints on stdout what the script prints, and nothing else; whynan speaks on stderr."""
    done = box.watched(TRAIN)
    assert [line.split()[0] for line in done.out.splitlines()] == ["0", "1", "2", "3", "4", "5"]
    assert "error[WN101]" in done.err
    assert "\x1b" not in done.err
    assert done.status == 0


def test_healthy_run_is_silent(box: Sandbox) -> None:
    """Nothing wrong: nothing on stderr, no incidents, no report, only metrics."""
    done = box.watched(TRAIN.replace("step != 2", "True"))
    assert (done.err, done.status) == ("", 0)
    assert sorted(p.name for p in box.run_dir.iterdir()) == ["metrics.jsonl", "run.json"]


def test_script_without_torch_leaves_nothing(box: Sandbox) -> None:
    """A program that trains nothing gets no run directory."""
    done = box.watched("print('no torch here')")
    assert (done.out, done.err, done.status) == ("no torch here\n", "", 0)
    assert not box.run_dir.exists()


def test_default_run_directory(box: Sandbox) -> None:
    """Without --run-dir the files go to whynan-runs/<time> below the working directory, a new one each run."""
    path = box.write(TRAIN)
    for _ in range(2):
        assert box.forked("run", str(path)).status == 0
    made = sorted((box.folder / "whynan-runs").iterdir())
    assert len(made) == 2
    for directory in made:
        assert re.match(r"\d{4}", directory.name)
        assert len(strict_lines(directory / "incidents.jsonl")) == 1


def test_run_directory_named_twice(box: Sandbox) -> None:
    """--run-dir given twice: the last one counts, the first is not even made."""
    path = box.write(TRAIN)
    done = box.forked("run", "--run-dir", "first", "--run-dir", "second/deeper", str(path))
    assert done.status == 0
    assert not (box.folder / "first").exists()
    assert (box.folder / "second" / "deeper" / "report.md").is_file()


def test_run_directory_used_twice(box: Sandbox) -> None:
    """A second run into the same directory loses nothing of the first."""
    box.watched(TRAIN)
    first = (box.run_dir / "incidents.jsonl").read_text(encoding="utf-8")
    done = box.watched(TRAIN)
    assert (box.run_dir / "incidents.jsonl").read_text(encoding="utf-8").startswith(first)
    assert len(done.incidents) == 2
    assert len(done.metrics) == 12


def test_script_changes_folder(box: Sandbox) -> None:
    """A script that changes the working directory does not tear its run directory in two."""
    source = textwrap.dedent(TRAIN).replace("    p =", "    if step == 1:\n        os.chdir('elsewhere')\n    p =")
    path = box.write("import os\nos.makedirs('elsewhere')\n" + source)
    done = box.forked("run", "--run-dir", "files", str(path))
    assert done.status == 0, done.err
    assert sorted(p.name for p in (box.folder / "files").iterdir()) == ["capsules", "incidents.jsonl", "metrics.jsonl", "report.html", "report.md", "run.json"]
    assert list((box.folder / "elsewhere").iterdir()) == []


def test_origin_names_the_file_from_the_working_directory(box: Sandbox) -> None:
    """An origin's file is relative to the working directory where it lies below it."""
    box.write("import torch\ndef loss_of(x):\n    return torch.log(x - x).mean()\n", "lib/losses.py")
    box.write(
        "import torch, losses\nw = torch.nn.Parameter(torch.ones(3))\noptimizer = torch.optim.SGD([w])\nlosses.loss_of(w).backward()\noptimizer.step()\n",
        "lib/train.py",
    )
    done = box.forked("run", "--run-dir", str(box.run_dir), "lib/train.py")
    origin = done.incidents[0]["origin"]
    assert (origin["file"], origin["line"], origin["code"]) == (str(Path("lib/losses.py")), 3, "return torch.log(x - x).mean()")
    assert "lib/losses.py:3" in done.err
