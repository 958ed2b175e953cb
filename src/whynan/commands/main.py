"""The command `whynan`."""

from __future__ import annotations

import sys

import click

from whynan import __version__
from whynan.commands.check import check
from whynan.commands.doctor import doctor
from whynan.commands.explain import explain
from whynan.commands.lint import lint
from whynan.commands.probe import probe
from whynan.commands.replay import replay
from whynan.commands.run import run
from whynan.errors import UsageError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="whynan")
def cli() -> None:
    """From `loss: nan` to the exact line, the reason, and a fix proven on the failing step."""


cli.add_command(run)
cli.add_command(explain)
cli.add_command(replay)
cli.add_command(check)
cli.add_command(lint)
cli.add_command(probe)
cli.add_command(doctor)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; usage errors are one line and exit status 2."""
    try:
        # not cli.main: it would turn the script's own exceptions into its own; the script runs outside click
        with cli.make_context("whynan", list(sys.argv[1:] if argv is None else argv)) as context:
            program = cli.invoke(context)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.ClickException as error:
        print(f"whynan: {error.format_message()}", file=sys.stderr)
        return 2
    except UsageError as error:
        return _misuse(error)
    if not callable(program):
        return int(program or 0)
    try:
        return int(program() or 0)
    except UsageError as error:
        return _misuse(error)


def _misuse(error: Exception) -> int:
    print(f"whynan: {error}", file=sys.stderr)
    return 2
