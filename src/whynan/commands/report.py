"""`whynan report`: the page of a run, or a live view of it."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

import click

from whynan.errors import UsageError

if TYPE_CHECKING:
    from whynan.report.hiding import Contents


@click.command(short_help="Make the report page of a run, or follow it live.")
@click.option("--open", "show", is_flag=True, help="Open the page in a browser.")
@click.option("--no-source", is_flag=True, help="Leave source lines and changes to them out.")
@click.option("--no-values", is_flag=True, help="Leave all values of the run out: curves, statistics, samples, numbers in sentences.")
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Where to write the page; default report.html in the run directory.")
@click.option("--follow", "-f", is_flag=True, help="Show the run, or a log of yours, in the terminal while it goes on.")
@click.option("--once", is_flag=True, help="With --follow: show it once.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN_DIR...")
def report(runs: tuple[Path, ...], show: bool, no_source: bool, no_values: bool, output: Path | None, follow: bool, once: bool) -> int:
    """Write report.html and report.md into RUN_DIR from the files that are there, also of a run that was killed.

    Needs no torch. Several run directories make one page, written to --output.
    """
    from whynan.report.hiding import Contents

    if follow or once:
        if len(runs) != 1:
            raise UsageError("--follow takes one run directory or log")
        from whynan.report.following import follow as watch

        return watch(runs[0], once)
    page = _written(runs, Contents(not no_source, not no_values), output)
    click.echo(f"whynan: wrote {page}", err=True)
    if show and not webbrowser.open(page.absolute().as_uri()):
        click.echo("whynan: no browser could be started; open the file by hand", err=True)
    return 0


def _written(runs: tuple[Path, ...], contents: Contents, output: Path | None) -> Path:
    from whynan.report.about import replace_text
    from whynan.report.html import page_for
    from whynan.report.writing import write_report

    if len(runs) > 1 and output is None:
        raise UsageError("several run directories make one page: say where with --output PAGE.html")
    if output is None:
        return write_report(runs[0], contents)
    text = page_for(runs, contents)
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(output, text)
    return output
