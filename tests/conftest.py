"""Ways to run a program: as python would, under `whynan run` in a process of its own, and in a forked child.

A fresh process pays seconds for importing torch. A forked child runs the same command line (`whynan.commands.main`)
with torch already there; it is used wherever the start of the process is not what is tested.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork with thread pools alive is not safe

import gc
import json
import runpy
import signal
import subprocess
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: once here instead of in every child
from torch.utils.data import dataloader

import whynan.commands.run
import whynan.engine.guard  # noqa: F401 (loaded here for all forked children)
from whynan.capsule.doors import compiled
from whynan.causes import catalogue

catalogue.forgiving = False
hypothesis.settings.register_profile("whynan", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("whynan")
PYTHON = sys.executable
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("COV_", "PYTEST_"))} | {"NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def hears_ctrl_c() -> None:
    """In a child before it starts: a shell's background job ignores Ctrl-C, and its children would too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@dataclass(frozen=True)
class Finished:
    """How a program ended."""

    out: str
    err: str
    status: int
    run_dir: Path

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """The lines of incidents.jsonl."""
        return strict_lines(self.run_dir / "incidents.jsonl")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return strict_lines(self.run_dir / "metrics.jsonl")

    @property
    def report(self) -> str:
        """The text of report.md."""
        return (self.run_dir / "report.md").read_text(encoding="utf-8")


def strict_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines as a strict reader does: a bare NaN or Infinity is an error."""
    if not path.exists():
        return []
    return [json.loads(line, parse_constant=_no_constant) for line in path.read_text(encoding="utf-8").splitlines()]


def _no_constant(name: str) -> Any:
    raise ValueError(f"bare {name} is not JSON")


class Sandbox:
    """A folder to write programs into and run them in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"

    def write(self, source: str, name: str = "train.py") -> Path:
        """Write a program."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        return path

    def python(self, *argv: str, **options: Any) -> Finished:
        """Run `python ARGV` in a new process."""
        return self._process([PYTHON, *argv], **options)

    def whynan(self, *argv: str, options: tuple[str, ...] = (), **more: Any) -> Finished:
        """Run `whynan run OPTIONS ARGV` in a new process."""
        return self._process([PYTHON, "-m", "whynan", "run", "--run-dir", str(self.run_dir), *options, *argv], **more)

    def _process(self, command: list[str], **options: Any) -> Finished:
        options = {"cwd": self.folder, "env": ENVIRONMENT, "input": "", "timeout": 120, **options}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        return Finished(done.stdout, done.stderr, done.returncode, self.run_dir)

    def forked(self, *argv: str, before: Callable[[], object] = lambda: None) -> Finished:
        """Run `whynan ARGV` in a forked child, after `before()`."""

        def work() -> int:
            from whynan.commands.main import main

            os.chdir(self.folder)
            before()
            return main(list(argv))

        return self.in_child(work)

    def watched(self, source: str, *options: str, before: Callable[[], object] = lambda: None) -> Finished:
        """Write a program and run it under `whynan run` in a forked child."""
        return self.forked("run", "--run-dir", str(self.run_dir), *options, str(self.write(source)), before=before)

    def plain(self, path: Path) -> Finished:
        """Run a program as it is in a forked child, where what it prints is all that counts; a SyntaxWarning ends it."""

        def work() -> int:
            os.chdir(self.folder)
            sys.argv[:], sys.path[0] = [str(path)], str(path.parent)
            warnings.simplefilter("error", SyntaxWarning)
            runpy.run_path(str(path), run_name="__main__")
            return 0

        return self.in_child(work)

    def in_child(self, work: Callable[[], int], seconds: int = 120) -> Finished:
        """Run something in a forked child; its exit status is what the interpreter would make of how it ended."""
        out, err = self.folder / "child.out", self.folder / "child.err"
        pid = os.fork()
        if pid == 0:
            status = 70
            gc.freeze()  # what the parent left behind is not the child's to free: a process group would wait for its threads
            try:
                os.setsid()
                for stream, path in ((1, out), (2, err)):
                    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 (stay open)
                os.environ["NO_COLOR"] = "1"
                status = _status_of(work)
            finally:
                for stream in (sys.stdout, sys.stderr):
                    if not stream.closed:
                        stream.flush()
                os._exit(status)
        return Finished(*_wait(pid, out, err, seconds), self.run_dir)


def _status_of(work: Callable[[], int]) -> int:
    try:
        return work()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 (stands in for the interpreter)
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exc()
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    return 1


def _wait(pid: int, out: Path, err: Path, seconds: int) -> tuple[str, str, int]:
    deadline = time.monotonic() + seconds
    done, status = os.waitpid(pid, os.WNOHANG)
    while not done:
        if time.monotonic() > deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pytest.fail(f"the child did not end in {seconds} s; it printed\n{out.read_text()}\n{err.read_text()}")
        time.sleep(0.005)
        done, status = os.waitpid(pid, os.WNOHANG)
    return out.read_text(errors="replace"), err.read_text(errors="replace"), os.waitstatus_to_exitcode(status)


@pytest.fixture
def box(tmp_path: Path) -> Sandbox:
    """A sandbox in an empty folder."""
    return Sandbox(tmp_path)


Shown = Callable[[str], list[str]]


@pytest.fixture
def shown(request: pytest.FixtureRequest) -> Shown:
    """The blocks of a page that name this test: `shown("docs/run.md")`; it runs them and compares their output (`doc_blocks.compare`)."""
    from doc_blocks import run_by

    def blocks(page: str) -> list[str]:
        found = run_by(page, f"tests/{request.path.name}::{request.node.name}")
        assert found, f"{page} has no block that is run by {request.node.name}"
        return found

    return blocks


@pytest.fixture(autouse=True)
def torch_is_left_alone() -> Iterator[None]:
    """No test may leave torch watched: the next one would see it."""
    torch.distributions.Distribution.set_default_validate_args(__debug__)  # torch.compile turns it off for the whole process
    before, hook = torch_doors(), sys.excepthook
    yield
    sys.excepthook = hook  # a process group writes its rank before every line of a traceback, also when it is gone
    after = torch_doors()
    by_compiling = ("Module.__init__", "Module.__setstate__")  # torch.compile replaces these itself; watching never touches them
    assert [name for name in before if after.get(name) is not before[name] and name not in by_compiling] == []


@pytest.fixture(autouse=True)
def only_tests_of_the_compiler_look_for_compiled_functions(request: pytest.FixtureRequest) -> Iterator[None]:
    """Once a test has compiled something, every guard after it would walk over all objects of the test process: most of the time of a short test."""
    real = compiled._has_compiled
    if request.path.stem not in ("test_compile", "test_docs", "test_capsules", "test_gpu"):
        compiled._has_compiled = lambda: False
    yield
    compiled._has_compiled = real


_OWNERS: dict[str, Any] = {
    "Module": torch.nn.Module, "Optimizer": torch.optim.Optimizer, "SGD": torch.optim.SGD, "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW, "LBFGS": torch.optim.LBFGS, "autograd": torch.autograd, "Function": torch.autograd.Function,
    "func": torch.func, "utils": torch.nn.utils, "clip_grad": torch.nn.utils.clip_grad, "GradScaler": torch.amp.GradScaler,
    "DataLoader": dataloader.DataLoader, "iterator": dataloader._BaseDataLoaderIter, "Tensor": torch.Tensor, "torch": torch,
    "ScriptFunction": torch.jit.ScriptFunction,
}  # fmt: skip


for _kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.LBFGS, torch.optim.RMSprop, torch.optim.Adagrad):
    _kind([torch.nn.Parameter(torch.zeros(1))])  # torch itself wraps the step of a class when the first one is made


def torch_doors() -> dict[str, Any]:
    """Every place at which watching could stand, as it is now; to be compared by identity."""
    doors = {f"{label}.{name}": value for label, owner in _OWNERS.items() for name, value in vars(owner).items()}
    doors["function modes"] = torch._C._len_torch_function_stack()
    doors["dispatch modes"] = torch._C._len_torch_dispatch_stack()
    doors["anomaly mode"] = torch.is_anomaly_enabled()
    doors["gradients"] = torch.is_grad_enabled()
    doors["backward threads"] = torch._C._is_multithreading_enabled()
    doors["hook of modules"] = len(torch.nn.modules.module._global_forward_hooks)
    return doors
