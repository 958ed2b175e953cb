"""The report as one page of HTML: no network, no second file, light and dark, for screens and paper."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from whynan import __version__
from whynan.records import Incident, Json, Remedy, count, number
from whynan.report import drawing, telling
from whynan.report.charts import Chart, charts, incident_marks
from whynan.report.hiding import Contents, hide
from whynan.report.listing import Row, listing
from whynan.report.reading import Run, read_run
from whynan.report.terminal import changed_lines
from whynan.report.tree import Branch, branches

MOST_KINDS = 30  # told in full
MOST_ROWS = 1000  # of the table of incidents
_RANKS = 256


@dataclass(frozen=True, slots=True)
class Kind:
    """Incidents of one cause at one place, told by the first of them."""

    number: int
    first: Incident
    steps: tuple[int, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    way: drawing.Way
    histograms: tuple[tuple[Any, tuple[drawing.Bar, ...]], ...]
    ranks: tuple[tuple[int, str], ...]
    inside: tuple[tuple[str, ...], ...]
    inside_title: str


@dataclass(frozen=True, slots=True)
class Told:
    """All that the template says of one run."""

    number: int
    run: Run
    name: str
    verdict: str
    outcome: str
    facts: tuple[str, ...]
    kinds: tuple[Kind, ...]
    more_kinds: int
    charts: tuple[Chart, ...]
    kind_of: tuple[int, ...]
    modules: tuple[Branch, ...]
    more_modules: int
    watched: tuple[str, ...]
    unwatched: tuple[str, ...]
    data: Mapping[str, Json]


def page_for(runs: Sequence[Path], contents: Contents | None = None, title: str = "") -> str:
    """Return one page for one or several run directories; several have a table at the head."""
    return render([read_run(folder) for folder in runs], contents, title)


def render(runs: Sequence[Run], contents: Contents | None = None, title: str = "") -> str:
    """Return the page."""
    contents = contents or Contents()
    told = [_told(n, hide(run, contents)) for n, run in enumerate(runs)]
    parts = {name: _part(name) for name in ("first.js", "uPlot.iife.min.js", "page.js", "uPlot.min.css", "style.css", "uPlot.LICENSE.txt")}
    data = _data([dict(t.data) for t in told])
    page: str = _template().render(
        runs=told,
        title=title or (f"whynan: {told[0].name}" if len(told) == 1 else "whynan: several runs"),
        contents=contents,
        contents_text=telling.contents_text(contents.source, contents.values),
        data=data,
        policy=_policy(parts),
        version=__version__,
        **{name.replace(".", "_"): text for name, text in parts.items()},
    )
    return page


def _policy(parts: Mapping[str, str]) -> str:
    """Nothing is loaded, and only these scripts and styles run: whatever text gets into the page stays text."""
    scripts = " ".join(_hash(parts[name]) for name in ("first.js", "uPlot.iife.min.js", "page.js"))
    styles = " ".join(_hash(parts[name]) for name in ("uPlot.min.css", "style.css"))
    return f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; base-uri 'none'; form-action 'none'"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@functools.cache
def _part(name: str) -> str:
    return resources.files("whynan.report").joinpath("page", name).read_text(encoding="utf-8").replace("\r\n", "\n")


@functools.cache
def _template() -> Any:
    import jinja2

    made = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    made.filters.update(number=number, count=count, plural=telling.plural)
    made.globals.update(
        label_of=telling.label_of,
        proof_of=telling.proof_of,
        symptom_text=telling.symptom_text,
        place_of=telling.place_of,
        changed_lines=changed_lines,
        tone_of=_tone,
    )
    return made.from_string(_part("template.html.j2"))


def _data(value: object) -> Any:
    """JSON that may stand in a script element: no tag can end it."""
    from markupsafe import Markup

    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&'\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)  # noqa: S704 (escaped above, a test holds it to that)


def _told(place: int, run: Run) -> Told:
    kinds = telling.kinds_of(run.incidents)
    numbers = {key: n for n, key in enumerate(kinds)}
    kind_of = tuple(min(numbers[telling.key_of(i)], MOST_KINDS - 1) for i in run.incidents)
    drawn, data = charts(run)
    rows, more = branches(run)
    marks = incident_marks(run.incidents, dict(enumerate(kind_of)), MOST_ROWS)
    return Told(
        number=place,
        run=run,
        name=run.folder.resolve().name or str(run.folder),
        verdict=telling.verdict(run),
        outcome=telling.outcome(run),
        facts=tuple(_facts(run)),
        kinds=tuple(_kind(n, same, run) for n, same in enumerate(list(kinds.values())[:MOST_KINDS])),
        more_kinds=max(len(kinds) - MOST_KINDS, 0),
        charts=tuple(drawn),
        kind_of=kind_of,
        modules=tuple(rows),
        more_modules=more,
        watched=tuple(telling.watched_lines(run)),
        unwatched=tuple(telling.unwatched_lines(run)),
        data={**data, "incidents": marks},
    )


def _facts(run: Run) -> list[str]:
    facts = run.facts
    ranks = max([r.rank + 1 for r in run.ranks], default=1)
    policy = next((i.action.policy for i in run.incidents), str(run.watched.get("policy") or ""))
    found = [telling.plural(run.steps, "step"), telling.plural(ranks, "rank"), f"policy {policy}" if policy else ""]
    found += [f"started {facts['started']}" if facts.get("started") else "", f"torch {facts['torch']}" if facts.get("torch") else ""]
    return [word for word in found if word]


def _kind(place: int, same: list[Incident], run: Run) -> Kind:
    first = same[0]
    notes = [e for e in first.cause.evidence if e and e not in first.cause.label]
    if not first.origin.exact and first.origin.note:
        notes.append(first.origin.doubt)
    return Kind(
        number=place,
        first=first,
        steps=tuple(i.step for i in same),
        rows=tuple(listing(first)),
        notes=tuple(notes),
        way=drawing.way(first.path),
        histograms=tuple((h, tuple(drawing.bars(h))) for h in first.histograms),
        ranks=tuple(_ranks(first, run)),
        inside=tuple(map(telling.inside_row, first.inside)),
        inside_title=telling.inside_title(first),
    )


def _ranks(incident: Incident, run: Run) -> list[tuple[int, str]]:
    """Each rank with what the incident was there: born, received, or nothing written about it."""
    total = max([incident.rank, *(r.rank for r in run.ranks), *(i.rank for i in run.incidents)]) + 1
    received = {r.rank for r in run.ranks if any(i.step == incident.step for i in r.received)}
    return [(n, "born here" if n == incident.rank else "received" if n in received else "nothing written") for n in range(min(total, _RANKS))]


def _tone(remedy: Remedy) -> str:
    """The colour of a remedy: by what the replay said, then by what it changes."""
    return {"proven": "good", "failed": "bad"}.get(remedy.result, "plain")
