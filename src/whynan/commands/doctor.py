"""`whynan doctor`: one page on this installation and project."""

from __future__ import annotations

from pathlib import Path

import click

from whynan.errors import UsageError
from whynan.records import dumps


@click.command(short_help="One page on this installation and project.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How to print the page.")
@click.argument("path", required=False, type=click.Path(path_type=Path))
def doctor(path: Path | None, form: str) -> int:
    """Say what is installed, which devices and number types work, and what in the project at PATH is known to be bad.

    The project is read, not run. Works without torch. Exit status: 0, or 1 where something known to be bad was found.
    """
    from whynan.doctoring.page import examine

    if path is not None and not path.exists():
        raise UsageError(f"no such file or folder: {path}")
    page = examine(path)
    click.echo(dumps(page.to_json()) if form == "json" else repr(page))
    return page.status
