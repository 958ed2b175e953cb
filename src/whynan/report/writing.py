"""`report.html` and `report.md` of a run directory, made from its files."""

from __future__ import annotations

from pathlib import Path

from whynan.report import html, markdown
from whynan.report.about import replace_text
from whynan.report.hiding import Contents
from whynan.report.reading import read_run

PAGE, TEXT = "report.html", "report.md"


def write_report(folder: Path, contents: Contents | None = None) -> Path:
    """Write both forms into the run directory; return the page's path."""
    run = read_run(folder)
    replace_text(folder / TEXT, markdown.render(run, contents))
    replace_text(folder / PAGE, html.render([run], contents))
    return folder / PAGE
