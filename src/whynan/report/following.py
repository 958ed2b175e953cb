"""A run, or any training log, in the terminal while it goes on: curves as small lines, the newest incidents. Touches nothing.

>>> spark([1.0, 2.0, 4.0, 8.0], 4)
'▁▃▆█'
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from whynan.errors import UsageError
from whynan.records import count, number
from whynan.report import about, telling
from whynan.report.lines import printable
from whynan.report.reading import FINITE, MISSING, Curves, Run, read_run

if TYPE_CHECKING:
    from rich.text import Text

EVERY = 1.0  # seconds between two looks
_BLOCKS = "▁▂▃▄▅▆▇█"
_NAMES = (("loss", "loss"), ("grad_norm", "norm"), ("lr", "lr"), ("scale", "scale"))
_INCIDENTS = 6
_SERIES = 8  # curves of a log that are shown
CROSS = "\u00d7"  # a value that was not finite


def follow(path: Path, once: bool = False) -> int:
    """Show a run directory until the run ends, or a log until Ctrl-C; in a pipe, and with `once`, show it a single time."""
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(_look(path, once, console.width)[0], soft_wrap=True)
        return 0
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                text, ended = _look(path, False, console.width)
                live.update(text, refresh=True)
                if ended:
                    return 0
                time.sleep(EVERY)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 0


def _look(path: Path, must: bool, width: int) -> tuple[Text, bool]:
    """Return a picture of a run directory or a log, and whether nothing more will come."""
    if path.is_file():
        return log_frame(path, width), False
    run = _read(path, must)
    return frame(run, width), run is not None and not about.running(run.facts)


def log_frame(path: Path, width: int = 80) -> Text:
    """Return one picture of a log that the program itself writes: its losses first, then what else it has."""
    from rich.text import Text

    from whynan.forensics.addresses import Place, Unreadable
    from whynan.forensics.logs import entries_of
    from whynan.forensics.logs.names import Role, naming

    curves: dict[str, list[float]] = {}
    step, bad = 0, ""
    try:
        for entry in filter(None, entries_of(Place.of(path))):
            step = entry.step if entry.step is not None else step + 1
            for name, value in entry.values.items():
                curves.setdefault(name, []).append(value)
                if not bad and not math.isfinite(value) and naming(name).role is not Role.OTHER:
                    bad = f"{name} {number(value)} at step {count(step)}"
    except Unreadable as error:
        raise UsageError(f"{path}: {error}") from None
    text = Text.assemble((printable(path.name), "bold"), (f"  step {count(step)}\n", "dim"))
    for name in sorted(curves, key=lambda name: list(Role).index(naming(name).role))[:_SERIES]:
        text.append(f"{printable(name)[:14]:<14} ")
        _line(text, number(curves[name][-1]), math.isfinite(curves[name][-1]), curves[name], max(width - 33, 10))
    text.append(f"not finite: {bad} (whynan check {printable(path.name)})" if bad else "all finite", style="bold red" if bad else "green")
    return text


def _read(folder: Path, must: bool) -> Run | None:
    """Read the run; one that has written nothing yet is waited for."""
    try:
        return read_run(folder)
    except UsageError:
        if must or not folder.parent.exists() or (folder.exists() and not folder.is_dir()):
            raise
        return None


def frame(run: Run | None, width: int = 80) -> Text:
    """Return one picture of the run."""
    from rich.text import Text

    if run is None:
        return Text("whynan: waiting for the run to write its first step", style="dim")
    state = "runs" if about.running(run.facts) else "ended"
    text = Text()
    text.append(f"{printable(run.folder.name or str(run.folder))}", style="bold")
    text.append(f"  step {count(max(run.steps - 1, 0))}  {state if run.facts else 'state not known'}\n", style="dim")
    for key, name in _NAMES:
        if run.curves.has(key):
            text.append(f"{name:<6}")
            _curve(text, run.curves, key, max(width - 24, 10))
    _incidents(text, run)
    return text


def _curve(text: Text, curves: Curves, key: str, width: int) -> None:
    last = next((i for i in range(len(curves) - 1, -1, -1) if curves.kinds[key][i] != MISSING), None)
    finite = last is not None and curves.kinds[key][last] == FINITE
    value = "" if last is None else number(curves.values[key][last])
    values = [_value(curves, key, i) for i in range(len(curves)) if curves.kinds[key][i] != MISSING]
    _line(text, value, finite, values, width)


def _line(text: Text, value: str, finite: bool, values: Sequence[float], width: int) -> None:
    text.append(f"{value:>11}  ", style="" if finite else "bold red")
    for sign in spark(values, width):
        text.append(sign, style="red" if sign == CROSS else "cyan")
    text.append("\n")


def _value(curves: Curves, key: str, place: int) -> float:
    return curves.values[key][place] if curves.kinds[key][place] == FINITE else math.nan


def spark(values: Sequence[float], width: int) -> str:
    """Return a curve in one line, on a log scale where all is positive; a cross where a value was not finite."""
    cells = [values[len(values) * n // width : len(values) * (n + 1) // width] for n in range(width)] if len(values) > width else [[v] for v in values]
    finite = [v for v in values if math.isfinite(v)]
    log = bool(finite) and min(finite) > 0
    ends = [math.log(v) if log else v for v in (min(finite), max(finite))] if finite else [0.0, 0.0]
    return "".join(_cell(cell, log, *ends) for cell in cells)


def _cell(cell: Sequence[float], log: bool, low: float, high: float) -> str:
    if any(not math.isfinite(v) for v in cell):
        return CROSS
    value = sum(v / len(cell) for v in cell)
    value = math.log(value) if log else value
    share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5  # halves: the whole may be past the range of a float
    return _BLOCKS[round(7 * min(max(share, 0.0), 1.0))]


def _incidents(text: Text, run: Run) -> None:
    if not run.incidents:
        warned = f"; {telling.plural(len(run.warnings), 'early warning')}" if run.warnings else ""
        text.append(f"no incident{warned}", style="green")
        return
    text.append(telling.plural(len(run.incidents), "incident"), style="bold red")
    for incident in run.incidents[-_INCIDENTS:]:
        words = f"{incident.cause.code} {incident.cause.title}  {telling.place_of(incident)}  {incident.action.taken}"
        text.append(f"\nstep {incident.step:<8} {printable(words)}")
    if len(run.incidents) > _INCIDENTS:
        text.append(f"\nand {len(run.incidents) - _INCIDENTS} before", style="dim")
