"""`whynan run`: a script nobody changed, watched."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from whynan.errors import UsageError

_LIMIT = re.compile(r"(.+?)(<x|<|>)\s*(\S+?)(?:\s+every\s+(\d+))?\s*")
_SIGNS = {"<": "below", ">": "above", "<x": "grows"}


def _limits(ctx: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, dict[str, float]] | None:
    """Read `NAME<NUMBER`, `NAME>NUMBER` and `NAME<xTIMES`, each with ` every STEPS` behind it or not."""
    track: dict[str, dict[str, float]] = {}
    for word in given:
        found = _LIMIT.fullmatch(word)
        name, sign, number, every = found.groups() if found is not None else ("", "", "", None)
        try:
            limits = {_SIGNS.get(sign, ""): float(number), **({"every": int(every)} if every else {})}
        except ValueError:
            raise UsageError(f"--track {word!r}: write NAME<NUMBER, NAME>NUMBER or NAME<xTIMES, for example '*.alpha<1' or 'out:blocks.*<x10'") from None
        track.setdefault(name.strip(), {}).update(limits)
    return track or None


_FLAGS = ("--wall-steps", "--drop-alone", "--rewind-data", "--skip-batches")


class _EndsAtModule(click.Command):
    """Like python, end the options of our own after `-m NAME`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "-m" in args:
            index = args.index("-m")
            if not any(not a.startswith("-") for a in _positional(args[:index])):
                args = [*args[: index + 2], "--", *args[index + 2 :]]
        return super().parse_args(ctx, args)


def _positional(args: list[str]) -> list[str]:
    """Return what stands before `-m` and is neither an option of ours nor its value."""
    rest, skip = [], False
    for item in args:
        if skip:
            skip = False
        elif item.startswith("--"):
            skip = "=" not in item and item not in _FLAGS
        else:
            rest.append(item)
    return rest


@click.command(
    cls=_EndsAtModule,
    short_help="Run a script and watch its training.",
    options_metavar="[OPTIONS]",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.option("--policy", default="skip", show_default=True, metavar="POLICY", help="observe, skip, rollback, stop, or a chain: skip:3,rollback,stop.")
@click.option("--in-a-row", type=click.IntRange(0), default=3, show_default=True, help="How often in a row a skip without a number may be used.")
@click.option("--in-total", type=click.IntRange(0), default=10, show_default=True, help="Bad steps lived with in a run; the next one stops it.")
@click.option("--wall-steps", is_flag=True, help="Let schedulers go on over dropped steps; by default they count updates.")
@click.option("--drop-alone", is_flag=True, help="Drop a bad micro-batch alone, not its whole accumulation window.")
@click.option("--snapshots", default="host", show_default=True, metavar="PLACE", help="Where a rollback's last good state is kept: host, device or off.")
@click.option("--snapshot-every", type=click.IntRange(1), default=100, show_default=True, help="How often that state is renewed, in updates.")
@click.option(
    "--rewind-data/--skip-batches", default=True, show_default=True, help="After a rollback, take a StatefulDataLoader back, or go on with its next batch."
)
@click.option("--lr-after-rollback", type=float, default=1.0, show_default=True, help="Factor on every learning rate after a rollback.")
@click.option("--clip-after-rollback", type=float, help="Largest gradient norm after a rollback.")
@click.option("--bad-terms", default="skip", show_default=True, metavar="ACTION", help="A loss with some bad terms: skip the step, or drop the terms.")
@click.option(
    "--spike", default="warn", show_default=True, metavar="ACTION", help="A finite loss or norm far outside what it was: warn, skip, rollback, stop, off."
)
@click.option("--rank-timeout", type=float, default=600.0, show_default=True, help="Seconds to wait for the other ranks when a step is bad.")
@click.option(
    "--track",
    multiple=True,
    metavar="NAME<LIMIT",
    callback=_limits,
    help="Warn when a value reaches a limit: '*.alpha<1', 'scale>0'; the output of a module: 'out:blocks.*<1e4'; growth: 'out:*<x10'; repeatable.",
)
@click.option("--save-every", type=click.IntRange(0), default=0, metavar="N", help="Write a checkpoint of everything every N updates, below the run directory.")
@click.option("--validate", metavar="FILE:FUNCTION", help="A function of the model that returns a number, or numbers by name; with --validate-every.")
@click.option("--validate-every", type=click.IntRange(0), default=0, metavar="N", help="Ask it every N updates, in eval mode, without a trace in the training.")
@click.option("--expect", type=click.Path(path_type=Path), metavar="FILE", help="Stages of health (TOML) that the run is held to; see docs/recovery.md.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Where to write; default whynan-runs/<time>.")
@click.option(
    "--capsule-size", type=click.FloatRange(0), default=2.0, show_default=True, metavar="GB", help="Most a capsule of a bad step may take; 0 writes none."
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(run_dir: Path | None, module: str | None, target: tuple[str, ...], capsule_size: float, **options: Any) -> Callable[[], int]:
    """Run SCRIPT (or -m MODULE) with its ARGS exactly as python would, and watch its training.

    The script's arguments, output and exit status are as without whynan; if whynan stops the training, the exit status is 3.
    """
    if module is None and not target:
        raise UsageError("give a script to run, or -m MODULE")
    torch_is_there()
    from whynan.engine.guard import Guard
    from whynan.engine.options import Options
    from whynan.integrations.meeting import introduce
    from whynan.launch import run_module, run_script
    from whynan.report.journal import Journal

    guard = introduce(Guard(Options(capsule_limit=int(capsule_size * (1 << 30)), **options), Journal(run_dir, files=True)))
    guard.command = [sys.executable, *sys.orig_argv[1:]]
    if module is not None:
        return functools.partial(run_module, guard, module, list(target))
    return functools.partial(run_script, guard, target[0], list(target[1:]))


def torch_is_there() -> None:
    """Say in one line when torch is missing or too old."""
    try:
        import torch
    except ImportError:
        raise UsageError("torch is not installed in this environment; pip install torch") from None
    parts = torch.__version__.split("+")[0].split(".")
    if tuple(int(p) for p in parts[:2] if p.isdigit()) < (2, 9):
        raise UsageError(f"torch {torch.__version__} is too old: whynan supports torch 2.9 and later")
