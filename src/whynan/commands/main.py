"""The command `whynan`."""

from __future__ import annotations

import contextlib
import io
import os
import sys

import click

from whynan import __version__
from whynan.commands.check import check
from whynan.commands.demo import demo
from whynan.commands.doctor import doctor
from whynan.commands.explain import explain
from whynan.commands.lint import lint
from whynan.commands.probe import probe
from whynan.commands.replay import replay
from whynan.commands.report import report
from whynan.commands.run import run
from whynan.ends import aloud
from whynan.errors import UsageError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="whynan")
def cli() -> None:
    """From `loss: nan` to the exact line, the reason, and a fix proven on the failing step."""


cli.add_command(run)
cli.add_command(explain)
cli.add_command(replay)
cli.add_command(report)
cli.add_command(check)
cli.add_command(lint)
cli.add_command(probe)
cli.add_command(doctor)
cli.add_command(demo)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; usage errors are one line and exit status 2."""
    try:
        # not cli.main: it would turn the script's own exceptions into its own; the script runs outside click
        with _stderr(), cli.make_context("whynan", list(sys.argv[1:] if argv is None else argv)) as context:
            program = cli.invoke(context)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.ClickException as error:
        aloud(f"whynan: {error.format_message()}")
        return 2
    except UsageError as error:
        return _misuse(error)
    except KeyboardInterrupt:  # of a command of ours: the user's own script runs below
        return _stopped("interrupted", 130)
    except BrokenPipeError:  # the reader, `head` perhaps, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return _stopped(f"{error.filename or 'the output'}: {(error.strerror or str(error)).lower()}", 2)
    if not callable(program):
        return int(program or 0)
    try:
        return int(program() or 0)
    except UsageError as error:
        return _misuse(error)


def _stderr() -> contextlib.AbstractContextManager[object]:
    """Stand in for a stderr that is closed, while a command of ours runs."""
    return contextlib.nullcontext() if sys.stderr is not None else contextlib.redirect_stderr(io.StringIO())


def _stopped(why: str, status: int) -> int:
    aloud(f"whynan: {why}")
    return status


def _misuse(error: Exception) -> int:
    aloud(f"whynan: {error}")
    return 2
