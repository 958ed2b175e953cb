"""The run directory: incidents and metrics as JSON lines, the report, and the voice on stderr.

Files are made when there is something to write. A disk that is full or read-only costs the files, not the training.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Protocol

from whynan import __version__
from whynan.ends import aloud, off_standard_streams, own_path
from whynan.errors import UsageError
from whynan.records import Action, Incident, Json, Notice, dumps
from whynan.recovery.place import is_ranked, rank_here
from whynan.recovery.policy import Budget
from whynan.report import about, terminal
from whynan.report.bars import above_bars
from whynan.report.writing import write_report

ISSUES = "the issue tracker of whynan"
_FLUSH_EVERY = 64
_WITH_MODULES = 20  # incidents that are written with the state of every module
_QUIET_STEPS = 1000  # an early warning about one thing is spoken once in so many steps; all are written


class Listener(Protocol):
    """Who wants to know of incidents besides the files and the terminal."""

    def incident(self, incident: Incident) -> None: ...
    def closed(self) -> None: ...


class Journal:
    """Writes one run. `directory=None` writes no files.

    `beside` names the files of a process that a script started by itself, for where it turns out to be no rank of a group.
    """

    def __init__(self, directory: Path | None = None, files: bool = False, quiet: bool = False, beside: str = "") -> None:
        self.directory = directory
        self.files = files or directory is not None
        self.quiet = quiet
        self._beside = beside
        self.incidents: list[Incident] = []
        self.counts: dict[tuple[str, str, int], int] = {}
        self.notices: dict[tuple[str, str], int] = {}  # those that were worth a word
        self.mild = 0  # and how many were not
        self._spoken: dict[tuple[str, str], int] = {}
        self._history: deque[tuple[int, float | None, float | None, float | None, float | None]] = deque(maxlen=200)
        self._metrics: IO[str] | None = None
        self._unwritten: list[tuple[int, float | None, float | None, float | None, float | None]] = []
        self._told_once: set[str] = set()
        self._broken = False
        self._failed: list[bool] = []  # failures of ours that were logged: whether the watching went on after them
        self.closed = False
        self._root: Path | None = None  # of the job, where that is not this process's own directory
        self.awaits = False  # other ranks are about to join: files are theirs, too
        self._received: Incident | None = None  # to be written with what is done about it
        self._own = 0  # incidents that this process tells
        self.listeners: list[Listener] = []
        self.each_step: Callable[[int, float | None, float | None, float | None, float | None], None] | None = None  # told what is written of a step
        self._begun: Path | None = None  # the directory that says so in its run.json

    # -- files --------------------------------------------------------------------------------------------------

    @off_standard_streams()
    def home(self) -> Path | None:
        """Return the run directory, making it on first use."""
        if not self.files or self._broken:
            return None
        rank, beside = rank_here(), self._beside if not is_ranked() else ""
        self._beside = ""
        if self.directory is None:
            self.directory = _fresh(Path("whynan-runs"), f"-rank-{rank}" if rank else f"-{beside}" if beside else "")
        elif beside:
            self.directory = self.directory / beside
        elif rank and self._root is None:
            self._live_below(self.directory, rank)
        if not self.directory.is_absolute():
            self.directory = self.directory.absolute()  # the script may change its working directory
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._give_up(error)
            return None
        if self._begun != self.directory:
            self._begun = self.directory
            about.begin(self.directory)
        return self.directory

    def place(self) -> str | None:
        """Return the run directory for the other ranks, making it."""
        home = self.home()
        return None if home is None else str(self._root or home)

    def join(self, rank: int, place: str | None) -> None:
        """Keep one journal with other ranks: the first writes it, the others keep files of their own below it."""
        if rank and place is not None:
            self._live_below(Path(place), rank)

    def _live_below(self, root: Path, rank: int) -> None:
        self._root = root.absolute()
        self.directory = self._root / "ranks" / f"rank-{rank}"

    def _give_up(self, error: OSError) -> None:
        self._broken = True
        self.say(f"whynan: cannot write the run directory ({error.strerror or error}); going on without files")

    def evaluated(self, step: int, loss: float | None, norm: float | None, lr: float | None) -> None:
        """Remember one of several evaluations inside an optimizer's step: part of the history, not of the metrics."""
        self._history.append((step, loss, norm, lr, None))

    def metrics(self, step: int, loss: float | None, norm: float | None, lr: float | None, scale: float | None) -> None:
        """Write one line of metrics; values that are not known are left out."""
        values = (step, loss, norm, lr, scale)
        self._history.append(values)
        if self.each_step is not None:
            self.each_step(*values)
        if self.files and not self._broken:
            self._unwritten.append(values)
            if (self._metrics is None and not self.awaits) or len(self._unwritten) >= _FLUSH_EVERY:
                self.flush()

    def flush(self) -> None:
        """Write out the metrics that wait."""
        rows, self._unwritten = self._unwritten, []
        if self._broken:
            return
        try:
            if self._metrics is None and rows and (home := self.home()) is not None:
                with off_standard_streams():
                    self._metrics = (home / "metrics.jsonl").open("a", encoding="utf-8")
            if self._metrics is not None and not self._metrics.closed:
                self._metrics.write("".join(_row(_known(*values)) for values in rows))
                self._metrics.flush()
        except OSError as error:
            self._give_up(error)

    @off_standard_streams()
    def validation(self, updates: int, values: Mapping[str, float]) -> None:
        """Write what the user's validation gave."""
        home = self.home()
        if home is None:
            return
        try:
            with (home / "validation.jsonl").open("a", encoding="utf-8") as file:
                file.write(dumps({"updates": updates, **values}) + "\n")
        except OSError as error:
            self._give_up(error)

    def history(self) -> list[dict[str, float]]:
        """Return the metrics of the last steps."""
        return [_known(*values) for values in self._history]

    def incident(self, incident: Incident, action: Action, tell: bool = True) -> None:
        """Close an incident: write it, flush it, tell it. One that all ranks share is told by one of them."""
        incident = replace(incident, action=action)
        self._write_received(action)
        key = (incident.cause.code, incident.origin.span.file, incident.origin.span.line)
        self.counts[key] = self.counts.get(key, 0) + 1
        if len(self.incidents) >= _WITH_MODULES:
            incident = replace(incident, modules=())
        self.incidents.append(incident)
        if tell:
            self._own += 1
            home = self.home()
            if home is not None:
                self._append(self._root or home, incident)
        for listener in self.listeners:
            listener.incident(incident)
        if tell and self.counts[key] == 1:
            with self._voice():
                terminal.show(incident)

    def stopped_by_another(self) -> str:
        """Return what the file of the job says last, where that is that another rank has stopped."""
        root = self._root or self.directory
        try:
            begun: Any = about.read(root).get("from") or {} if root is not None else {}
            lines = (root / "incidents.jsonl").read_bytes()[begun.get("incidents.jsonl", 0) :].splitlines() if root is not None else []
            last = json.loads(lines[-1]) if lines else {}
        except (OSError, ValueError):
            return ""
        if not last or last["action"]["taken"] != "stopped" or last["rank"] == rank_here():
            return ""
        return f"rank {last['rank']} stopped at step {last['step']}: {last['cause']['title']}"

    @off_standard_streams()
    def pending(self, incident: Incident | None) -> None:
        """Write down a diagnosis that is still to be settled with other ranks, for where that never happens; None takes it away again."""
        home = self.home()
        if home is None:
            return
        try:
            if incident is None:
                (home / "pending.json").unlink(missing_ok=True)
            else:
                (home / "pending.json").write_text(dumps(incident.to_json()) + "\n", encoding="utf-8")
        except OSError as error:
            self._give_up(error)

    def again(self) -> None:
        """Count one more of the last incident without telling it."""
        last = self.incidents[-1]
        self.counts[last.cause.code, last.origin.span.file, last.origin.span.line] += 1

    def received(self, incident: Incident) -> None:
        """Note that this rank merely received a bad value; written, in a file of its own, with what is done about it."""
        self._received = incident

    def _write_received(self, action: Action) -> None:
        incident, self._received = self._received, None
        home = self.home() if incident is not None else None
        if incident is not None and home is not None:
            own = home if self._root is not None else home / "ranks" / f"rank-{incident.rank}"
            self._append(own, replace(incident, action=action))

    @off_standard_streams()
    def _append(self, home: Path, incident: Incident) -> None:
        try:
            home.mkdir(parents=True, exist_ok=True)
            with (home / "incidents.jsonl").open("ab", buffering=0) as file:  # one write: other ranks may append at the same time
                file.write((dumps(incident.to_json()) + "\n").encode())
            self.flush()
        except OSError as error:
            self._give_up(error)

    def warning(self, notice: Notice, aloud: bool = True) -> None:
        """Write an early warning; say it, unless it is mild or the same was said in the last thousand steps."""
        notice = replace(notice, time=notice.time or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        key = (str(notice.kind), notice.name)
        if aloud:
            self.notices[key] = self.notices.get(key, 0) + 1
        else:
            self.mild += 1
        home = self.home()
        if home is not None:
            try:
                with off_standard_streams(), (home / "warnings.jsonl").open("a", encoding="utf-8") as file:
                    file.write(dumps(notice.to_json()) + "\n")
            except OSError as error:
                self._give_up(error)
        if not aloud:
            return
        if key not in self._spoken or notice.step - self._spoken[key] >= _QUIET_STEPS:
            self._spoken[key] = notice.step
            self.say(f"whynan: warning: {notice.text}")

    def close(self, steps: int, budget: Budget, watched: Mapping[str, Json] | None = None) -> None:
        """Finish the files and say how it ended."""
        if self.closed:
            return
        self.closed = True
        self.flush()
        if self._metrics is not None:
            with contextlib.suppress(OSError):
                self._metrics.close()
        if self._begun is not None and not self._broken:
            with off_standard_streams():
                about.finish(self._begun, steps, {**(watched or {}), "incidents": sum(self.counts.values())})
        if self.notices:
            where = self.directory / "warnings.jsonl" if self.directory is not None and self.files and not self._broken else None
            self.say(terminal.warnings_line(self.notices, _short_path(where), self.mild))
        report = self._write_report() if self._own or (self.incidents and self._root is None) else None
        for listener in self.listeners if report is not None else ():
            listener.closed()
        if self._own:
            with self._voice():
                terminal.farewell(self.incidents, self.counts, budget, _short_path(report), steps)

    @off_standard_streams()
    @own_path()
    def _write_report(self) -> Path | None:
        """Write the report of the whole job; of several ranks the last one to end has the last word."""
        home = self.home()
        if home is None:
            return None
        try:
            return write_report(self._root or home)
        except UsageError:
            return None  # somebody has removed the files
        except OSError as error:
            self._give_up(error)
            return None

    def abandon(self) -> None:
        """Leave the files to somebody else (a forked child has nothing to write)."""
        self.files, self._metrics, self.closed, self.quiet = False, None, True, True
        self._unwritten.clear()

    # -- voice --------------------------------------------------------------------------------------------------

    def say(self, text: str, always: bool = False) -> None:
        """Say one line on stderr; of several ranks only the first speaks, unless it is about this rank alone."""
        if not self.quiet and (always or not rank_here()):
            with self._voice():
                aloud(text)

    def say_once(self, text: str) -> None:
        """Say a line that was not said before."""
        if text not in self._told_once:
            self._told_once.add(text)
            self.say(text)

    @contextlib.contextmanager
    def _voice(self) -> Iterator[None]:
        """Speak without tearing a progress bar, and never let a closed stderr harm the training."""
        if self.quiet or sys.stderr is None:
            with own_path(), contextlib.redirect_stderr(io.StringIO()):
                yield
            return
        with own_path(), contextlib.suppress(OSError, ValueError), above_bars():
            yield

    def internal_error(self, error: BaseException, watching: bool = False) -> None:
        """Log our own failure, once, with how to report it."""
        if watching in self._failed:
            return
        self._failed.append(watching)
        text = "".join(traceback.format_exception(error))
        home = self.home()
        where = ""
        if home is not None:
            with contextlib.suppress(OSError), off_standard_streams():
                with (home / "internal-error.txt").open("a", encoding="utf-8") as file:
                    file.write(f"whynan {__version__}\n{text}")
                where = f"; details in {home / 'internal-error.txt'}"
        off = "" if watching else "watching is off, "
        self.say(
            f"whynan: internal error, {off}training goes on: {type(error).__name__}: {error}{where}\n        please report it with that text to {ISSUES}",
            always=True,
        )


def _known(step: int, loss: float | None, norm: float | None, lr: float | None, scale: float | None) -> dict[str, float]:
    row: dict[str, float] = {"step": step}
    for key, value in (("loss", loss), ("grad_norm", norm), ("lr", lr), ("scale", scale)):
        if value is not None:
            row[key] = value
    return row


def _row(row: dict[str, float]) -> str:
    if all(math.isfinite(v) for v in row.values()):
        return "{" + ", ".join(f'"{k}": {v!r}' for k, v in row.items()) + "}\n"
    return dumps(row) + "\n"


def _short_path(path: Path | None) -> Path | None:
    """Return a path below the working directory as a relative one."""
    try:
        return path.relative_to(Path.cwd()) if path is not None else None
    except (ValueError, OSError):
        return path


def _fresh(parent: Path, ending: str = "") -> Path:
    """Return a directory name by the time, with a number where that is taken."""
    stem = datetime.now().strftime("%m%d-%H%M%S") + ending
    name, number = parent / stem, 1
    while name.exists():
        number += 1
        name = parent / f"{stem}-{number}"
    return name
