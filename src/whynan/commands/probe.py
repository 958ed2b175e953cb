"""`whynan probe`: attack a model and a loss before the first step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from whynan.commands.run import torch_is_there
from whynan.records import dumps


@click.command(short_help="Attack a model and its loss before training.")
@click.option("--budget", type=click.FloatRange(0), default=30.0, show_default=True, help="Seconds for the search; 0 leaves it out.")
@click.option("--lr", type=float, metavar="RATE", help="Judge this learning rate by a few updates on copies; for the factory's optimizer, else AdamW.")
@click.option("--optimizer", metavar="NAME", help="The optimizer that --lr is for, by its name in torch.optim.")
@click.option("--clip", type=float, metavar="NORM", help="The norm that training clips gradients to.")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Where the failing step is kept as a capsule; default whynan-runs/<time>.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How to print the report.")
@click.argument("factory", metavar="MODULE:FACTORY")
def probe(factory: str, budget: float, lr: float | None, optimizer: str | None, clip: float | None, run_dir: Path | None, form: str) -> int:
    """Call MODULE:FACTORY (or path/to/file.py:factory) for a model, a loss and a batch, and try to break one step of them.

    The factory returns (model, loss_fn, batch), or a mapping with these names and, where known, bounds, vocabulary,
    padding, ignore_index, optimizer, lr, clip. Exit status: 0 nothing found, 1 findings, 2 misuse.
    """
    torch_is_there()
    from whynan.probing.api import probe_subject
    from whynan.probing.loading import load_subject
    from whynan.probing.subject import checked

    say = _progress()
    with contextlib.redirect_stdout(sys.stderr):  # what the model prints, a hundred times over, is no part of the report
        given = {"optimizer": optimizer, "lr": lr, "clip": clip}
        subject = checked(replace(load_subject(factory), **{k: v for k, v in given.items() if v is not None}))  # type: ignore[arg-type]
        made = probe_subject(subject, budget, run_dir, keep=True, say=say)
    say("")
    click.echo(dumps(made.to_json()) if form == "json" else repr(made))
    return made.status


def _progress() -> Callable[[str], None]:
    """Say on stderr what is being done, where somebody looks."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: click.echo(f"\r\x1b[K{text[:78]}", err=True, nl=False)
