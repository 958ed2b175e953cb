"""Leave out what must not leave the house: source, or values. Done to the records, before any form is made of them."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace

from whynan.records import Cause, Experiment, Histogram, Incident, Origin, Remedy, Span, Stage, Symptom, TensorStats
from whynan.report.reading import Curves, RankFiles, Run

HIDDEN = "…"
_NUMBER = re.compile(r"(?<![A-Za-z_\d.])[-+]?\d[\d\u2009]*(?:\.\d+)?(?:e[-+]?\d+)?(?![A-Za-z_\d])")
_QUOTED = re.compile(r"`[^`]*`|'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True, slots=True)
class Contents:
    """What a report may hold."""

    source: bool = True
    values: bool = True


def hide(run: Run, contents: Contents) -> Run:
    """Return the run without what the report may not hold."""
    if contents.source and contents.values:
        return run

    def shown(incidents: Iterable[Incident]) -> tuple[Incident, ...]:
        found = tuple(incidents)
        found = found if contents.source else tuple(map(_without_source, found))
        return found if contents.values else tuple(map(_without_values, found))

    ranks = tuple(RankFiles(r.rank, r.steps, shown(r.received)) for r in run.ranks)
    run = replace(run, incidents=shown(run.incidents), ranks=ranks)
    return run if contents.values else _without_curves(run)


def _without_curves(run: Run) -> Run:
    facts = dict(run.facts)
    if run.watched:
        facts["watched"] = {k: v for k, v in run.watched.items() if k != "readings"}
    steps = Curves(array("q", run.curves.steps), *_emptied(run.curves))
    return replace(run, curves=steps, warnings=tuple(replace(w, value=None, text=numberless(w.text)) for w in run.warnings), facts=facts)


def _emptied(curves: Curves) -> tuple[dict[str, array[float]], dict[str, bytearray]]:
    size = len(curves)
    return {name: array("d", bytes(8 * size)) for name in curves.values}, {name: bytearray(size) for name in curves.kinds}


# -- values -----------------------------------------------------------------------------------------------------


def numberless(text: str) -> str:
    """Put a mark in place of every number; names that contain digits stay.

    >>> numberless("log2 of 0.25 in row 3 is -2.0e+3")
    'log2 of … in row … is …'
    """
    return _NUMBER.sub(HIDDEN, text)


def _without_values(incident: Incident) -> Incident:
    origin, cause = incident.origin, incident.cause
    return replace(
        incident,
        symptom=replace(incident.symptom, detail="", name=_symptom_name(incident.symptom)),
        origin=replace(
            origin,
            inputs=tuple(map(_bare, origin.inputs)),
            output=_bare(origin.output) if origin.output is not None else None,
            samples=(),
            note=numberless(origin.note),
            from_=tuple(replace(s, label=numberless(s.label)) for s in origin.from_),
        ),
        cause=replace(cause, label=numberless(cause.label), evidence=tuple(map(numberless, cause.evidence))),
        remedies=tuple(replace(r, effect=numberless(r.effect)) for r in incident.remedies),
        experiments=tuple(Experiment(numberless(e.question), numberless(e.answer)) for e in incident.experiments),
        path=tuple(replace(s, value=_bare(s.value) if s.value is not None else None) for s in incident.path),
        histograms=(),
        terms=tuple(map(_bare, incident.terms)),
        inside=(),
        modules=tuple(replace(m, largest=None, weight_largest=None) for m in incident.modules),
    )


def _symptom_name(symptom: Symptom) -> str:
    """The message of an exception may quote data."""
    return numberless(_QUOTED.sub(HIDDEN, symptom.name)) if symptom.place == "exception" else symptom.name


def _bare(stats: TensorStats) -> TensorStats:
    return TensorStats(stats.name, stats.dtype, stats.shape)


# -- source -----------------------------------------------------------------------------------------------------


def _without_source(incident: Incident) -> Incident:
    words = _fragments(incident)
    origin, cause = incident.origin, incident.cause
    return replace(
        incident,
        origin=_origin_without(origin, words),
        cause=_cause_without(cause, words),
        remedies=tuple(_remedy_without(r, words) for r in incident.remedies),
        experiments=tuple(Experiment(_hide_in(e.question, words), _hide_in(e.answer, words)) for e in incident.experiments),
        path=tuple(_stage_without(s, words) for s in incident.path),
        histograms=tuple(_histogram_without(h, n) for n, h in enumerate(incident.histograms)),
        source=(),
        terms=tuple(replace(t, name=f"term {n + 1}") for n, t in enumerate(incident.terms)),
        inside=tuple(replace(t, name=f"value {n + 1}") for n, t in enumerate(incident.inside)),
    )


def _fragments(incident: Incident) -> list[str]:
    """Pieces of the user's source that may stand in a sentence, the longest first."""
    spans = [incident.origin.span, *incident.origin.from_, *(s.span for s in incident.path)]
    found = {s.code for s in spans} | {t.name for t in incident.origin.inputs if not t.name.isidentifier()} | {h.name for h in incident.histograms}
    found |= {t.name for t in incident.terms if not t.name.isidentifier() and not t.name.startswith("term ")}
    found |= {line[1:].strip() for r in incident.remedies for line in r.diff.splitlines() if line[:1] in "+-"}
    return sorted((f for f in found if len(f) > 2 and f != "result"), key=len, reverse=True)


def _hide_in(text: str, words: list[str]) -> str:
    for word in words:
        text = text.replace(word, HIDDEN)
    return text


def _span_without(span: Span, words: list[str]) -> Span:
    return replace(span, code="", label=_hide_in(_QUOTED.sub(HIDDEN, span.label), words))


def _origin_without(origin: Origin, words: list[str]) -> Origin:
    return replace(
        origin,
        span=_span_without(origin.span, words),
        from_=tuple(_span_without(s, words) for s in origin.from_),
        inputs=tuple(replace(t, name=f"argument {n + 1}") for n, t in enumerate(origin.inputs)),
        note=_hide_in(origin.note, words),
    )


def _cause_without(cause: Cause, words: list[str]) -> Cause:
    def bare(text: str) -> str:
        return _hide_in(_QUOTED.sub(HIDDEN, text), words)

    return replace(cause, label=bare(cause.label), evidence=tuple(map(bare, cause.evidence)))


def _remedy_without(remedy: Remedy, words: list[str]) -> Remedy:
    return replace(remedy, title=_hide_in(remedy.title, words), effect=_hide_in(remedy.effect, words), diff="")


def _stage_without(stage: Stage, words: list[str]) -> Stage:
    return replace(stage, span=_span_without(stage.span, words))


def _histogram_without(histogram: Histogram, number: int) -> Histogram:
    return histogram if histogram.name == "result" else replace(histogram, name=f"argument {number + 1}")
