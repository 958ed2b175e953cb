"""`whynan doctor`: one page on this installation and project."""

from __future__ import annotations

from pathlib import Path

import click

from whynan.errors import UsageError
from whynan.records import dumps


@click.command(short_help="One page on this installation and project.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True, help="How to print the page.")
@click.option("--settings", is_flag=True, help="Recommend settings for the YAML, TOML or JSON at PATH, as a diff that `patch -p0` takes.")
@click.option("--run", "runs", multiple=True, type=click.Path(path_type=Path), help="With --settings: a run directory or log to measure by; repeatable.")
@click.argument("path", required=False, type=click.Path(path_type=Path))
def doctor(path: Path | None, form: str, settings: bool, runs: tuple[Path, ...]) -> int:
    """Say what is installed, which devices and number types work, and what in the project at PATH is known to be bad.

    The project is read, not run, and no file is changed. Works without torch. Exit status: 0, or 1 where something known to be bad
    was found or a setting is recommended.
    """
    if path is not None and not path.exists():
        raise UsageError(f"no such file or folder: {path}")
    if runs and not settings:
        raise UsageError("--run goes with --settings")
    if settings:
        return _settings(path or Path(), runs, form)
    from whynan.doctoring.page import examine

    page = examine(path)
    click.echo(dumps(page.to_json()) if form == "json" else repr(page))
    return page.status


def _settings(path: Path, runs: tuple[Path, ...], form: str) -> int:
    from whynan.doctoring.project import recommend_settings

    answer = recommend_settings(path, runs)
    click.echo(dumps(answer.to_json()) if form == "json" else repr(answer))
    return answer.status
