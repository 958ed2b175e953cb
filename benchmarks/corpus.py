"""The public corpus in `tests/cases`: programs, what is true of them, and running one in a forked child."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CASES = Path(__file__).resolve().parent.parent / "tests" / "cases"
_MARK = re.compile(r"#\s*<-\s*(WN\d{3})\s*(\w*)")


@dataclass(frozen=True)
class Program:
    """One program of the corpus; healthy ones have no code."""

    path: Path
    line: int = 0
    code: str = ""
    phase: str = ""

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"


def failing() -> list[Program]:
    """Return the programs that fail, with the marked line and code."""
    found = []
    for path in sorted(CASES.glob("WN*/bad*.py")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            mark = _MARK.search(line)
            if mark:
                found.append(Program(path, number, mark[1], mark[2]))
                break
    return found


def healthy() -> list[Program]:
    """Return the programs that must not raise an alarm: the healthy ones and every healed one."""
    return [Program(p) for p in sorted([*CASES.glob("healthy/*.py"), *CASES.glob("WN*/good*.py")]) if not p.name.startswith("_")]


def in_child(work: Callable[[], Any], seconds: int = 120) -> dict[str, Any]:
    """Run something in a forked child and return what it returned, what it printed and its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        answer, out, err = (Path(folder) / name for name in ("answer", "out", "err"))
        pid = os.fork()
        if pid == 0:
            status = 70
            gc.freeze()  # what the parent left behind is not the child's to free
            try:
                os.setsid()
                for stream, path in ((1, out), (2, err)):
                    os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115 (open until the child ends)
                answer.write_text(json.dumps(work()))
                status = 0
            except SystemExit as stop:
                status = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            except BaseException:
                import traceback

                traceback.print_exc()
                status = 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = _wait(pid, seconds)
        return {
            "answer": json.loads(answer.read_text()) if answer.exists() and answer.stat().st_size else None,
            "status": status,
            "out": out.read_text(errors="replace") if out.exists() else "",
            "err": err.read_text(errors="replace") if err.exists() else "",
        }


def _wait(pid: int, seconds: int) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -9


def plain(path: Path) -> None:
    """Run a program as it is."""
    import runpy

    sys.argv = [str(path)]
    runpy.run_path(str(path), run_name="__main__")


def watched(path: Path, policy: str = "skip", run_dir: Path | None = None) -> dict[str, Any]:
    """Run a program under whynan; return its incidents, what was told of the first, and its exit status."""
    from whynan.engine.guard import Guard
    from whynan.engine.options import Options
    from whynan.errors import TrainingStopped
    from whynan.launch import run_script
    from whynan.report.journal import Journal
    from whynan.report.terminal import diagnosis

    journal = Journal(run_dir, files=run_dir is not None)
    guard = Guard(Options(policy=policy), journal)
    status = 0
    try:
        status = run_script(guard, str(path), [])
    except TrainingStopped:
        status = 3
    except SystemExit as stop:
        status = int(stop.code or 0)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        status = 1
    told = diagnosis(journal.incidents[0]) + "\n" if journal.incidents else ""
    return {"status": status, "incidents": [i.to_json() for i in journal.incidents], "told": told, "internal": bool(journal._failed)}


def each(programs: list[Program], work: Callable[[Path], Any]) -> Iterator[tuple[Program, dict[str, Any]]]:
    """Run the same work on many programs, one at a time."""
    for program in programs:
        yield program, in_child(lambda path=program.path: work(path))  # type: ignore[misc]
