"""The page itself: gathered, and as text 80 columns wide."""

from __future__ import annotations

import textwrap
from pathlib import Path

from whynan.doctoring import installation
from whynan.doctoring.facts import Grade, Page
from whynan.doctoring.project import read_project

WIDTH = 80
_INDENT = 24


def examine(path: Path | None) -> Page:
    """Look at this installation, and at a project where one is given.

    Cost: a few small products on each device; one parse of each source file.
    """
    torch = installation.torch_here()
    sections = (
        ("versions", installation.versions(torch)),
        ("devices", installation.devices(torch)),
        ("settings", installation.settings(torch)),
        ("whynan", installation.abilities(torch)),
    )
    found, read = read_project(path) if path is not None else ([], 0)
    return Page(sections, (*installation.remarks(torch), *found), read)


def text(page: Page) -> str:
    """Return the page."""
    lines: list[str] = []
    for title, rows in page.sections:
        lines.append(title)
        for name, value in rows:
            lines += _wrapped(f"  {name:<{_INDENT - 2}}", value)
    order = [Grade.BAD, Grade.NOTE, Grade.UNREAD]
    for remark in sorted(page.remarks, key=lambda r: order.index(r.grade)):
        place = f"{remark.where}: " if remark.where else ""
        lines += _wrapped(f"{remark.grade}: ", f"{place}{remark.text}" + (f" ({remark.advice})" if remark.advice else ""), 6)
    bad = sum(r.grade is Grade.BAD for r in page.remarks)
    scope = f"{page.files} source files read, " if page.files else ""
    lines.append(f"{scope}{f'{bad} known to be bad' if bad else 'nothing known to be bad'}")
    return "\n".join(lines)


def _wrapped(head: str, words: str, indent: int = _INDENT) -> list[str]:
    return textwrap.wrap(words, WIDTH, initial_indent=head, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False) or [head]
