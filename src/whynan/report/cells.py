"""A report as a notebook shows it: the text of the terminal, painted, in one piece of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from whynan.records import Incident
from whynan.report import terminal

# Colours that can be read on light and on dark ground alike; the rest is the notebook's own.
_RED, _GREEN = "#d73a49", "#2da44e"
_FRAME = "margin:0;padding:.6em .8em;border-left:3px solid {colour};overflow-x:auto;background:transparent;color:inherit;font-size:.9em;line-height:1.35"


def page(text: str) -> str:
    """Return text as HTML; nothing in it is taken for markup.

    >>> "&lt;b&gt;" in page("error[WN101]: <b>"), "<script" in page("<script>")
    (True, False)
    """
    lines = text.splitlines()
    bad = any(line.startswith(("error", "bad")) for line in lines)
    body = "\n".join(_painted(line) for line in lines)
    return f'<pre style="{_FRAME.format(colour=_RED if bad else _GREEN)}">{body}</pre>'


def _painted(line: str) -> str:
    start = line.lstrip()
    if line.startswith("error["):
        return f'<b style="color:{_RED}">{escape(line)}</b>'
    if "| " in line and line.partition("| ")[2].strip()[:1] == "^":
        head, bar, rest = line.partition("| ")
        return f'{escape(head + bar)}<span style="color:{_RED}">{escape(rest)}</span>'
    if start.startswith(("+ ", "= proven:")):
        return f'<span style="color:{_GREEN}">{escape(line)}</span>'
    if start.startswith("- "):
        return f'<span style="color:{_RED}">{escape(line)}</span>'
    return escape(line)


def standing(steps: int, incidents: Sequence[Incident], watches: bool) -> str:
    """Say where a watched run stands.

    >>> standing(12, [], True)
    'whynan: watching, 12 steps, no incident'
    """
    count = f"{len(incidents)} incident{'s' if len(incidents) > 1 else ''}" if incidents else "no incident"
    head = f"whynan: {'watching' if watches else 'not watching'}, {steps} step{'s' if steps != 1 else ''}, {count}"
    return "\n\n".join([head, terminal.diagnosis(incidents[0])] if incidents else [head])
