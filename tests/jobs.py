"""Start jobs of several ranks: under torchrun in processes of their own, or as forked children with torch already there.

Nothing here waits without an end: when the time is up the whole job is killed and the test fails with what it printed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ENVIRONMENT, PYTHON, Sandbox, _status_of, strict_lines

PROGRAM = Path(__file__).with_name("ranks_program.py")
SECONDS = 90
MARK = "WHYNAN_TEST_JOB"  # in the environment of every process of a job


@dataclass(frozen=True)
class Ended:
    """How a job ended."""

    out: list[str]  # of each rank; of all together under torchrun
    status: list[int]
    run_dir: Path

    @property
    def text(self) -> str:
        """Everything that was printed."""
        return "\n".join(self.out)

    def said(self, word: str) -> dict[int, str]:
        """What the ranks printed after a word and their number."""
        return {int(number): value for number, value in re.findall(rf"{word} (\d+) (\S+) \n", self.text)}  # another line may be glued before it

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """The incidents of the job."""
        return strict_lines(self.run_dir / "incidents.jsonl")

    def received(self, rank: int) -> list[dict[str, Any]]:
        """What a rank wrote down for itself."""
        return strict_lines(self.run_dir / "ranks" / f"rank-{rank}" / "incidents.jsonl")

    def metrics(self, rank: int) -> list[dict[str, Any]]:
        """The metrics of a rank."""
        return strict_lines((self.run_dir / "ranks" / f"rank-{rank}" if rank else self.run_dir) / "metrics.jsonl")


def line_of(marker: str) -> int:
    """Return the line of the program that carries a comment."""
    lines = PROGRAM.read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))


def torchrun(box: Sandbox, ranks: int, asked: dict[str, Any], *options: str, agent: tuple[str, ...] = ("--standalone",)) -> Ended:
    """Run the program under `torchrun … -m whynan run`."""
    command = [PYTHON, "-m", "torch.distributed.run", *agent, f"--nproc-per-node={ranks}", "-m", "whynan", "run",
               "--run-dir", str(box.run_dir), *options, str(PROGRAM), json.dumps(asked)]  # fmt: skip
    return finish(box, [start(box, command)])


def start(box: Sandbox, command: list[str]) -> subprocess.Popen[str]:
    """Start a command in a session of its own."""
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1", MARK: str(box.folder)}
    return subprocess.Popen(
        command, cwd=box.folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(box: Sandbox, started: list[subprocess.Popen[str]]) -> Ended:
    """Wait for commands; kill them and fail when the time is up."""
    printed = []
    try:
        printed = [process.communicate(timeout=SECONDS)[0] for process in started]
    except subprocess.TimeoutExpired:
        _kill_all(str(box.folder))
        printed = [process.communicate()[0] for process in started]
        pytest.fail(f"the job did not end in {SECONDS} s; it printed\n" + "\n".join(printed))
    return Ended(printed, [process.returncode for process in started], box.run_dir)


def _kill_all(mark: str) -> None:
    """Kill everything that a command started: torchrun gives its workers sessions of their own."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def job(box: Sandbox, ranks: int, asked: dict[str, Any], *options: str, watched: bool = True, program: Path = PROGRAM) -> Ended:
    """Run the program on forked ranks without an agent that would end the others when one dies."""
    box.folder.mkdir(parents=True, exist_ok=True)
    words = ["run", "--run-dir", str(box.run_dir), *options, str(program), json.dumps(asked)] if watched else [str(program), json.dumps(asked)]
    port = free_port()
    outs = [box.folder / f"rank-{rank}.out" for rank in range(ranks)]
    children = [_child(box, rank, ranks, port, outs[rank], words, watched) for rank in range(ranks)]
    status = _wait(children, outs)
    return Ended([out.read_text(errors="replace") for out in outs], status, box.run_dir)


def _child(box: Sandbox, rank: int, ranks: int, port: int, out: Path, words: list[str], watched: bool) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    gc.freeze()  # what the parent left behind is not the child's to free
    try:
        os.setsid()
        stream = os.open(out, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 (stay open)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NO_COLOR="1")
        os.chdir(box.folder)
        status = _status_of(lambda: _whynan(words) if watched else _python(words))
    finally:
        for printed in (sys.stdout, sys.stderr):
            printed.flush()
        os._exit(status)


def _whynan(words: list[str]) -> int:
    from whynan.commands.main import main

    return main(words)


def _python(words: list[str]) -> int:
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")
    return 0


def _wait(children: list[int], outs: list[Path]) -> list[int]:
    deadline = time.monotonic() + SECONDS
    status: dict[int, int] = {}
    while len(status) < len(children):
        for pid in children:
            if pid not in status and (found := os.waitpid(pid, os.WNOHANG))[0]:
                status[pid] = os.waitstatus_to_exitcode(found[1])
        if time.monotonic() > deadline:
            for pid in set(children) - set(status):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            pytest.fail(f"the job did not end in {SECONDS} s; it printed\n" + "\n".join(f"[{o.stem}] {o.read_text(errors='replace')}" for o in outs))
        time.sleep(0.01)  # asks the system whether they have ended; nothing is assumed after it
    return [status[pid] for pid in children]
