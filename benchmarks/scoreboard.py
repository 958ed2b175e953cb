"""Which line does each tool name? The public corpus, once per tool, as a Markdown table.

    python benchmarks/scoreboard.py                       # all tools
    python benchmarks/scoreboard.py --tool whynan -v      # one tool, with the programs it gets wrong
    python benchmarks/scoreboard.py --filter WN501 --json board.json

Every program runs in a forked child of this process, so that torch is imported once. A program that ends with an
exception of torch's own (an index out of range, a singular matrix) counts as silent for a tool that adds nothing to it;
the line under the table says how many there are.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a fork with thread pools alive is not safe

import argparse
import importlib
import inspect
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import corpus
import torch
import torch._dynamo  # optimizers import it at their first step: once here instead of in every child
from corpus import Program
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import whynan.engine.guard  # noqa: F401 (loaded here for all forked children)

TORCH = os.path.dirname(torch.__file__)
Report = dict[str, Any]  # lines: the lines named, None when silent; ended: the exception it ended with; more of whynan's
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def run_plainly(path: Path) -> tuple[str, BaseException | None]:
    """Run a program; return the name of the exception it ended with, and that exception."""
    try:
        corpus.plain(path)
    except SystemExit:
        return "", None
    except Exception as error:
        return type(error).__name__, error
    return "", None


def with_whynan(path: Path) -> Report:
    """Name the place of the first incident, with its cause and whether the first remedy was proven."""
    answer = corpus.watched(path)
    if not answer["incidents"]:
        return {"lines": None, "ended": ""}
    first = answer["incidents"][0]
    remedy = (first["remedies"] or [{"result": ""}])[0]
    return {"lines": [first["origin"]["line"]], "ended": "", "code": first["cause"]["code"], "proven": remedy["result"] == "proven"}


def with_anomaly_mode(path: Path) -> Report:
    """Name the last frame in the user's file of the forward traceback that anomaly mode warns."""
    warned: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: warned.append(str(message))
        torch.autograd.set_detect_anomaly(True)
        ended, error = run_plainly(path)
    if error is None or "returned nan values" not in str(error):
        return {"lines": None, "ended": ended}
    text = next((w for w in reversed(warned) if "Traceback of forward call" in w), "")
    frames = [int(line) for file, line in _FRAME.findall(text) if os.path.realpath(file) == str(path)]
    return {"lines": frames[-1:], "ended": ""}


class FirstNonfinite(TorchDispatchMode):
    """Remembers the line of the first operation with a non-finite output; what comes after it is let through."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.line: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.line is None and not _only_memory(func) and any(map(_is_bad, tree_leaves(out))):
            self.line = _user_line(sys._getframe(1))
        return out


def _only_memory(func: Any) -> bool:
    """Whether an operation computes nothing: memory not yet written (`torch.empty`) and views of it are not asked."""
    views = (r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return "empty" in func.__name__ or any(views)


def _is_bad(value: object) -> bool:
    """Whether a tensor holds a NaN or an infinity."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()) or value.layout != torch.strided:
        return False
    return not bool(torch.isfinite(value).all())


def _user_line(frame: FrameType | None) -> int:
    """Return the line of the innermost frame outside torch; in the backward pass that is the call of `backward`."""
    while frame is not None and (frame.f_code.co_filename.startswith(TORCH) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame.f_lineno if frame is not None else 0


def with_first_nonfinite(path: Path) -> Report:
    """Name the first operation with a non-finite output, as one would write it in ten lines."""
    with FirstNonfinite() as mode:
        ended, _ = run_plainly(path)
    return {"lines": None if mode.line is None else [mode.line], "ended": ended}


def with_debug_underflow(path: Path) -> Report:
    """Name all lines of the forward of the module at which `DebugUnderflowOverflow` stops."""
    _attach_to_outermost_modules()
    ended, error = run_plainly(path)
    if error is None or "inf/nan detected" not in str(error):
        return {"lines": None, "ended": ended}
    module = _reported_module(error.__traceback__)
    return {"lines": _forward_lines(module, path), "ended": ""}


def _attach_to_outermost_modules() -> None:
    from transformers.debug_utils import DebugUnderflowOverflow  # type: ignore[import-not-found]

    call, attached, depth = nn.Module.__call__, {}, [0]

    def watched_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if depth[0] == 0 and id(self) not in attached:
            attached[id(self)] = DebugUnderflowOverflow(self)
        depth[0] += 1
        try:
            return call(self, *args, **kwargs)
        finally:
            depth[0] -= 1

    nn.Module.__call__ = watched_call  # type: ignore[method-assign]


def _reported_module(trace: TracebackType | None) -> nn.Module | None:
    """Return the module whose hook raised."""
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code.co_name == "forward_hook":
            module = frame.f_locals.get("module")
            return module if isinstance(module, nn.Module) else None
    return None


def _forward_lines(module: nn.Module | None, path: Path) -> list[int]:
    """Return the lines of a module's forward where it stands in the program's own file."""
    try:
        forward = type(module).forward  # type: ignore[union-attr]
        if os.path.realpath(inspect.getsourcefile(forward) or "") != str(path):
            return []
        lines, start = inspect.getsourcelines(forward)
    except (OSError, TypeError, AttributeError):
        return []
    return list(range(start, start + len(lines)))


TOOLS: dict[str, tuple[str, Callable[[Path], Report]]] = {
    "whynan": ("whynan", with_whynan),
    "anomaly": ("torch anomaly mode", with_anomaly_mode),
    "transformers": ("transformers DebugUnderflowOverflow", with_debug_underflow),
    "naive": ("first non-finite operation", with_first_nonfinite),
}


@dataclass
class Score:
    """The figures of one tool, and the programs behind them."""

    tool: str
    programs: int = 0
    right: list[str] = field(default_factory=list)
    right_cause: list[str] | None = None
    silent: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    healthy: int = 0
    false_alarms: list[str] = field(default_factory=list)
    proven: list[str] | None = None
    backward: int = 0
    backward_right: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # silent programs that ended with an exception
    broken: list[str] = field(default_factory=list)  # the child itself failed or took too long

    def row(self) -> list[str]:
        """Return the cells of the table."""
        counts = (self.right, self.right_cause, self.silent, self.wrong, self.false_alarms, self.proven)
        right, cause, silent, wrong, alarms, proven = ("-" if c is None else str(len(c)) for c in counts)
        false = f"{alarms} of {self.healthy}"
        return [self.tool, str(self.programs), right, cause, silent, wrong, false, proven, f"{len(self.backward_right)} of {self.backward}"]


COLUMNS = (
    "tool", "programs", "right line", "right cause", "silent", "wrong line", "false alarms on healthy programs",
    "first remedies proven", "right line, backward only",
)  # fmt: skip


def score(key: str, failing: list[Program], healthy: list[Program]) -> Score:
    """Run one tool on all programs."""
    label, work = TOOLS[key]
    result = Score(label, len(failing), healthy=len(healthy), backward=sum(p.phase == "backward" for p in failing))
    if key == "whynan":
        result.right_cause, result.proven = [], []
    for program, done in corpus.each(failing, work):
        _count_failing(result, program, done["answer"])
    for program, done in corpus.each(healthy, work):
        report = done["answer"]
        if report is None:
            result.broken.append(program.name)
        elif report["lines"] is not None:
            result.false_alarms.append(program.name)
    return result


def _count_failing(result: Score, program: Program, report: Report | None) -> None:
    if report is None:
        result.broken.append(program.name)
        report = {"lines": None, "ended": ""}
    if report["lines"] is None:
        result.silent.append(program.name)
        if report["ended"]:
            result.ended.append(f"{program.name} ({report['ended']})")
    elif program.line not in report["lines"]:
        result.wrong.append(program.name)
    else:
        result.right.append(program.name)
        if program.phase == "backward":
            result.backward_right.append(program.name)
    if result.right_cause is not None and report.get("code") == program.code:
        result.right_cause.append(program.name)
    if result.proven is not None and report.get("proven"):
        result.proven.append(program.name)


def table(scores: Iterable[Score]) -> str:
    """Return the Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" + "|---:" * (len(COLUMNS) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(s.row()) + " |" for s in scores)])


def details(result: Score) -> str:
    """Return the programs behind the figures of one tool."""
    lists = (("silent", result.silent), ("wrong line", result.wrong), ("false alarm", result.false_alarms), ("did not run", result.broken))
    return "\n".join(f"{result.tool}: {kind}: {name}" for kind, names in lists for name in names)


def missing(key: str) -> str:
    """Return why a tool cannot take part, or nothing; a tool that can is loaded here for all forked children."""
    if key != "transformers":
        return ""
    try:
        importlib.import_module("transformers.debug_utils")
    except ImportError as error:
        return "transformers is not installed" if error.name == "transformers" else f"transformers cannot be imported: {error}"
    return ""


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tool", action="append", choices=list(TOOLS), help="only this tool (may be repeated)")
    parser.add_argument("--filter", default="", help="only programs whose name contains this text")
    parser.add_argument("--json", type=Path, help="also write the figures, with the names of the programs, to this file")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the names of wrong and silent programs")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the tools and print the table."""
    options = _options(argv)
    torch.set_num_threads(1)
    failing, healthy = ([p for p in kind if options.filter in p.name] for kind in (corpus.failing(), corpus.healthy()))
    scores, left_out = [], []
    for key in options.tool or TOOLS:
        if reason := missing(key):
            left_out.append(f"Left out: {TOOLS[key][0]} ({reason}).")
            continue
        scores.append(score(key, failing, healthy))
        if options.verbose and (text := details(scores[-1])):
            print(text, flush=True)
    print(table(scores))
    print(f"\ntorch {torch.__version__}, {len(failing)} failing and {len(healthy)} healthy programs.", *left_out, sep="\n")
    for result in scores:
        if result.ended:
            print(f"{result.tool}: {len(result.ended)} of the silent programs end with an exception, of the program or of the tool.")
        if result.broken:
            print(f"{result.tool}: {len(result.broken)} programs did not run to an answer: {', '.join(result.broken)}.")
    if options.json:
        options.json.write_text(json.dumps([asdict(s) for s in scores], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
