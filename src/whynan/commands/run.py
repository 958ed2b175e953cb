"""`whynan run`: a script nobody changed, watched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import click

from whynan.errors import UsageError


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
            skip = "=" not in item
        else:
            rest.append(item)
    return rest


@click.command(cls=_EndsAtModule, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--policy", type=click.Choice(["observe", "skip", "stop"]), default="skip", show_default=True, help="What to do with a bad step.")
@click.option("--in-a-row", type=click.IntRange(0), default=3, show_default=True, help="Bad steps in a row before the training is stopped.")
@click.option("--in-total", type=click.IntRange(0), default=10, show_default=True, help="Bad steps in total before the training is stopped.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Where to write; default whynan-runs/<time>.")
@click.option(
    "--capsule-size", type=click.FloatRange(0), default=2.0, show_default=True, metavar="GB", help="Most a capsule of a bad step may take; 0 writes none."
)
@click.option("-m", "module", metavar="MODULE", help="Run a module, as python -m does.")
@click.argument("target", nargs=-1, type=click.UNPROCESSED)
def run(policy: str, in_a_row: int, in_total: int, run_dir: Path | None, capsule_size: float, module: str | None, target: tuple[str, ...]) -> Callable[[], int]:
    """Run SCRIPT (or -m MODULE) with its ARGS exactly as python would, and watch its training.

    The script's arguments, output and exit status are as without whynan; if whynan stops the training it is 3.
    """
    if module is None and not target:
        raise UsageError("give a script to run, or -m MODULE")
    torch_is_there()
    from whynan.guard import Guard
    from whynan.launch import run_module, run_script
    from whynan.recovery.policy import Policy
    from whynan.report.journal import Journal

    guard = Guard(Policy(policy), in_a_row, in_total, Journal(run_dir, files=True), int(capsule_size * (1 << 30)))
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
