"""The run as Markdown, for pasting into an issue: what the page says, without pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator

from whynan.records import Histogram, Incident, Stage, count, number
from whynan.report import telling, terminal
from whynan.report.charts import charts
from whynan.report.hiding import Contents, hide
from whynan.report.reading import FINITE, MISSING, NAN, NEGINF, SERIES, Run
from whynan.report.tree import branches

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # nothing in it may steer a terminal
_ROWS, _KINDS, _LAST, _MODULES = 200, 30, 12, 40


def render(run: Run, contents: Contents | None = None) -> str:
    """Return the report."""
    contents = contents or Contents()
    run = hide(run, contents)
    parts = ["# whynan report", "", cell(telling.verdict(run)), cell(telling.outcome(run)), "", telling.contents_text(contents.source, contents.values), ""]
    if run.incidents:
        parts += [*_table(run), ""]
    kinds = list(telling.kinds_of(run.incidents).values())
    for same in kinds[:_KINDS]:
        parts += [*_one(same[0], run, contents), ""]
    parts += [f"{len(kinds) - _KINDS} more kinds are in incidents.jsonl.", ""] if len(kinds) > _KINDS else []
    parts += [*_curves(run, contents), *_modules(run), *_watched(run)]
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], "\n".join(parts).rstrip("\n") + "\n")


def cell(text: object) -> str:
    r"""Make text fit for a cell: one line, nothing that ends the cell or starts HTML.

    >>> cell("a|b\n<c>")
    'a\\|b &lt;c>'
    """
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def fenced(text: str, kind: str) -> list[str]:
    """Put text into a block that nothing in it can end."""
    fence = "```"
    while fence in text:
        fence += "`"
    return [f"{fence}{kind}", text.rstrip("\n"), fence]


def _table(run: Run) -> list[str]:
    parts = ["| step | code | cause | place | action |", "|---|---|---|---|---|"]
    for incident in run.incidents[:_ROWS]:
        place = f"`{telling.place_of(incident)}`" if incident.origin.span.known else "not known"
        parts.append(f"| {incident.step} | {cell(incident.cause.code)} | {cell(incident.cause.title)} | {cell(place)} | {cell(incident.action.taken)} |")
    if len(run.incidents) > _ROWS:
        parts += ["", f"{count(len(run.incidents) - _ROWS)} more are in incidents.jsonl."]
    return parts


def _one(incident: Incident, run: Run, contents: Contents) -> list[str]:
    parts = [f"## Step {incident.step}: {cell(incident.cause.title)} ({cell(incident.cause.code)}, {incident.cause.confidence})", ""]
    parts += fenced(terminal.diagnosis(incident), "text")
    parts += _list("The way from origin to symptom", [_stage(s) for s in incident.path])
    parts += _list("Values at the origin", [_histogram(h) for h in incident.histograms])
    parts += _inside(incident)
    parts += _list("Tried on the replay", [f"{e.question}: {e.answer}" for e in incident.experiments])
    for remedy in incident.remedies:
        if remedy.diff:
            parts += [
                "",
                f"{cell(remedy.title)} ({telling.label_of(remedy)}; {cell(telling.proof_of(remedy, incident.step))})",
                "",
                *fenced(remedy.diff, "diff"),
            ]
    received = [str(r.rank) for r in run.ranks if any(i.step == incident.step for i in r.received)]
    if run.ranks:
        parts += ["", f"Ranks: born on rank {incident.rank}; received by {', '.join(received) or 'none that wrote it down'}."]
    return parts


def _inside(incident: Incident) -> list[str]:
    """The named values of the function where it was born, side by side."""
    if not incident.inside:
        return []
    rows = ["", f"{telling.inside_title(incident)}:", "", "| value | shape | nan | inf | min | max |", "|---|---|---|---|---|---|"]
    return rows + [f"| {' | '.join(map(cell, telling.inside_row(value)))} |" for value in incident.inside]


def _list(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", "", *(f"- {cell(line)}" for line in lines)] if lines else []


def _stage(stage: Stage) -> str:
    place = f" at {stage.span.file}:{stage.span.line}" if stage.span.known else ""
    value = f": {stage.value.line()}" if stage.value is not None else f": {stage.note}" if stage.note else ""
    more = f" (after {stage.left_out} more)" if stage.left_out else ""
    role = "" if stage.role == "carried" else f"{stage.role} "
    return f"{role}{stage.op}{' (backward)' if stage.phase == 'backward' else ''}{place}{value}{more}"


def _histogram(histogram: Histogram) -> str:
    spread = ""
    if histogram.counts:
        top = max(histogram.counts) or 1
        blocks = "".join(" ▁▂▃▄▅▆▇█"[-(-8 * c // top)] for c in histogram.counts)
        spread = f" {number(histogram.edges[0])} [{blocks}] {number(histogram.edges[-1])}{' by powers of ten' if histogram.logarithmic else ''}"
    odd = (("zeros", histogram.zeros), ("nan", histogram.nan), ("inf", histogram.posinf), ("-inf", histogram.neginf))
    return f"{histogram.name} {histogram.dtype}{spread}" + "".join(f", {label} {count(n)}" for label, n in odd if n)


def _curves(run: Run, contents: Contents) -> Iterator[str]:
    if not contents.values or not len(run.curves):
        return
    yield from ("## Curves", "")
    yield from (f"- {chart.title}: {'' if chart.drawn else 'not measured: '}{chart.summary}" for chart in charts(run)[0])
    yield from ("", "The last steps:", "", "| step | loss | gradient norm | learning rate | loss scale |", "|---|---|---|---|---|")
    for place in range(max(len(run.curves) - _LAST, 0), len(run.curves)):
        yield f"| {run.curves.steps[place]} | {' | '.join(_point(run, name, place) for name in SERIES)} |"
    yield ""


def _point(run: Run, name: str, place: int) -> str:
    kind = run.curves.kinds[name][place]
    if kind in (FINITE, MISSING):
        return number(run.curves.values[name][place]) if kind == FINITE else ""
    return "nan" if kind == NAN else "-inf" if kind == NEGINF else "inf"


def _modules(run: Run) -> Iterator[str]:
    rows, more = branches(run)
    if not rows:
        return
    yield from ("## Modules", "", "| module | reached | last good | first bad | largest output | of the limit |", "|---|---|---|---|---|---|")
    for row in rows[:_MODULES]:
        cells = (row.name or row.shown, row.bad or "no", row.last_good, row.first_bad, row.output, row.output_share)
        yield f"| {' | '.join(map(cell, cells))} |"
    if more or len(rows) > _MODULES:
        yield from ("", f"{more + max(len(rows) - _MODULES, 0)} more are on the page.")
    yield ""


def _watched(run: Run) -> Iterator[str]:
    yield from ("## What was watched, and what was not", "")
    yield from (f"- watched: {cell(line)}" for line in telling.watched_lines(run))
    yield from (f"- not watched: {cell(line)}" for line in telling.unwatched_lines(run))
