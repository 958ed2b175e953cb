"""`whynan check`: checkpoints, data and logs that are already on disk."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whynan.errors import UsageError

if TYPE_CHECKING:
    from whynan.forensics.checking import Deeds
    from whynan.forensics.findings import Report


_INTERRUPTED = 130  # as shells count it


def _expected(given: tuple[str, ...]) -> dict[str, Any]:
    """Sort `--expect` into numbers that should be stored and stages of health."""
    from whynan.tripwire.stages import read_stages

    files = [word for word in given if word.endswith(".toml") or ("=" not in word and Path(word).is_file())]
    if len(files) > 1:
        raise UsageError(f"--expect {files[1]}: one file of stages at a time")
    return {"expect": _numbers(tuple(w for w in given if w not in files)), "stages": read_stages(Path(files[0])) if files else ()}


def _numbers(given: tuple[str, ...]) -> dict[str, float]:
    """Read `NAME=NUMBER`."""
    found = {}
    for word in given:
        name, sign, value = word.partition("=")
        try:
            if not (name.strip() and sign):
                raise ValueError
            found[name.strip()] = float(value)
            if math.isnan(found[name.strip()]):
                raise ValueError
        except ValueError:
            raise UsageError(f"--expect {word!r}: write NAME=NUMBER, for example lr=1e-4") from None
    return found


def _ranges(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    """Read `NAME=LOW:HIGH`."""
    found = {}
    for word in given:
        name, sign, ends = word.partition("=")
        low, colon, high = ends.partition(":")
        try:
            if not (name.strip() and sign and colon):
                raise ValueError
            found[name.strip()] = (float(low or "-inf"), float(high or "inf"))
            if not found[name.strip()][0] <= found[name.strip()][1]:
                raise ValueError
        except ValueError:
            raise UsageError(f"--range {word!r}: write NAME=LOW:HIGH, for example tokens=0:151643") from None
    return found


@click.command(short_help="Look at checkpoints, data and logs on disk.")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--as", "kind", type=click.Choice(["checkpoint", "data", "log"]), help="Take every PATH for this, whatever it looks like.")
@click.option(
    "--expect", multiple=True, metavar="NAME=NUMBER|FILE", help="A number that should be stored: lr=1e-4, epoch=29; repeatable. Or stages.toml for logs."
)
@click.option("--range", "ranges", multiple=True, callback=_ranges, metavar="NAME=LOW:HIGH", help="The range of a column, both ends in it; repeatable.")
@click.option("--padding", type=float, metavar="ID", help="The id that fills rows.")
@click.option("--ignore-index", "ignored", type=float, default=-100.0, show_default=True, metavar="ID", help="The label that does not count.")
@click.option("--batch", type=click.IntRange(1), default=64, show_default=True, help="Rows of a batch in the training.")
@click.option("--allow", multiple=True, metavar="PATTERN", help="Names whose values are not looked at: '*.mask'; repeatable.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default="cores", help="Threads that read.")
@click.option("--against", default="", metavar="OTHER", help="Say what changed since OTHER; a folder: from each checkpoint to the next.")
@click.option("--quarantine", default="", metavar="DIR", help="Move bad checkpoints there; never deletes, never overwrites.")
@click.option("--dry-run", is_flag=True, help="With --quarantine: only say what would be moved.")
@click.option("--format", "form", type=click.Choice(["text", "json", "github"]), default="text", show_default=True, help="How to print the report.")
@click.option("--plot", default="", metavar="FILE", help="Write the curves of logs: curve.svg or curve.png.")
@click.option("--all", "everything", is_flag=True, help="List every tensor and every finding.")
@click.option("--no-progress", is_flag=True, help="No progress bar.")
def check(
    paths: tuple[str, ...],
    form: str,
    everything: bool,
    no_progress: bool,
    plot: str,
    against: str,
    quarantine: str,
    dry_run: bool,
    **wishes: Any,
) -> Callable[[], int]:
    """Look at each PATH: a checkpoint, a folder of them, data, a log, an address such as s3://bucket/key, or module:dataset.

    Nothing in a file is run. Exit status: 0 nothing found, 1 findings, 2 misuse or a PATH that cannot be read.
    """
    if dry_run and not quarantine:
        raise UsageError("--dry-run goes with --quarantine DIR")
    if plot and not plot.lower().endswith((".svg", ".png")):
        raise UsageError(f"--plot {plot}: a curve is written as .svg or .png")
    from whynan.forensics.checking import Deeds

    wishes.update(_expected(wishes["expect"]))
    deeds = Deeds(against, quarantine, dry_run)
    return lambda: _check(paths, deeds, wishes, form, everything, not no_progress, plot)


def _check(paths: tuple[str, ...], deeds: Deeds, wishes: dict[str, Any], form: str, everything: bool, progress: bool, plot: str) -> int:
    from whynan.commands.progress import Bar
    from whynan.forensics.checking import look, wishes_of

    try:
        with Bar(paths, progress) as bar:
            report = look(paths, wishes_of({**wishes, "tick": bar.tick}), deeds)
        _print(report, form, everything)
        if plot:
            _plot(report, Path(plot), wishes["allow"])
    except KeyboardInterrupt as stop:
        print("whynan: interrupted", *getattr(stop, "__notes__", ()), sep="\nwhynan: ", file=sys.stderr)
        return _INTERRUPTED
    return report.status


def _print(report: Report, form: str, everything: bool) -> None:
    """Print the report; a reader that has seen enough, as `head` has, changes nothing of the answer."""
    try:
        _show(report, form, everything)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again at its end
        if not isinstance(error, BrokenPipeError):
            raise UsageError(f"the report cannot be written: {error.strerror}") from None


def _plot(report: Report, target: Path, allow: tuple[str, ...]) -> None:
    """Draw the curves of every log; the second and later ones get a number, and never the name of a file that is there."""
    from whynan.forensics import logs
    from whynan.forensics.addresses import Place
    from whynan.forensics.findings import Kind
    from whynan.forensics.wishes import Wishes

    curves = [c for c in report.checked if c.kind is Kind.LOG and not c.unreadable]
    if not curves:
        raise UsageError(f"--plot {target}: there is no log among what was checked")
    free = (p for n in count(2) if not os.path.lexists(p := target.with_stem(f"{target.stem}-{n}")))
    for curve, file in zip(curves, chain([target], free), strict=False):
        logs.plot(Place.of(curve.path), file, Wishes(kind=Kind.LOG, allow=allow))
        if len(curves) > 1:
            print(f"whynan: {curve.path} is drawn in {file}", file=sys.stderr)


def _show(report: Report, form: str, everything: bool) -> None:
    from whynan.report import annotations, checks

    if form == "text":
        checks.show(report, everything)
        return
    said = checks.as_json(report) if form == "json" else annotations.github(report)
    if said:
        sys.stdout.write(f"{said}\n")
