"""Findings as text with carets, one line each, JSON, GitHub annotations, SARIF 2.1.0."""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from whynan import __version__
from whynan.lint.codes import CODES
from whynan.lint.findings import Confidence, Finding, Place, Severity
from whynan.lint.linting import Report

_SHOWN = 10
WIDTH = 80


def shown_path(path: str) -> str:
    """A path from the working directory, where it lies below it."""
    return printable(_near(path))


def printable(path: str) -> str:
    r"""A path in one line: a name may hold a line end or an escape sequence, which would take over the terminal.

    >>> printable("a\nb.py")
    'a\\nb.py'
    """
    return path if path.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in path)


def _near(path: str) -> str:
    try:
        near = os.path.relpath(path)
    except ValueError:
        return path
    return path if near.startswith("..") else near


def where(finding: Finding) -> str:
    """path:line:column, with the cell of a notebook."""
    cell = f":cell {finding.cell}" if finding.cell else ""
    return f"{shown_path(finding.path)}{cell}:{finding.place.line}:{finding.place.column + 1}"


def text(report: Report) -> str:
    """Each finding with its source, and the ranked summary last."""
    lines = {key: source.split("\n") for key, source in report.texts.items()}  # once a file: a file can have thousands of findings
    return "\n".join([*(_block(f, lines.get((f.path, f.cell), [])) + "\n" for f in report.findings), summary(report)])


def _block(finding: Finding, lines: list[str]) -> str:
    gutter = len(str(max(finding.place.line, finding.origin.line if finding.origin else 0)))
    pad = " " * gutter
    out = [f"{finding.severity}[{finding.code}]: {finding.title}  (confidence {finding.confidence})", f"{pad}--> {where(finding)}", f"{pad} |"]
    marks: list[tuple[Place, str, str]] = [(finding.place, "^", finding.label)]
    if finding.origin is not None:
        marks.append((finding.origin, "-", finding.origin_label))
    last = 0
    for place, sign, label in sorted(marks, key=lambda m: m[0].line):
        if last and place.line > last + 1:
            out.append("...")
        out += _marked(lines, place, sign, label, gutter)
        last = place.line
    out.append(f"{pad} |")
    if finding.note:
        out += _wrapped(f"{pad} = note: ", finding.note)
    out += _wrapped(f"{pad} = help: ", finding.help + _fixable(finding))
    out.append(f"{pad} = more: whynan explain {finding.code}")
    return "\n".join(out)


def _fixable(finding: Finding) -> str:
    if finding.fix is None:
        return ""
    return " [--fix]" if finding.fix.safe else " [--unsafe-fixes]"


def _marked(lines: list[str], place: Place, sign: str, label: str, gutter: int) -> list[str]:
    source = lines[place.line - 1].replace("\t", " ") if place.line <= len(lines) else ""
    end = place.end_column if place.end_line == place.line else len(source)
    width = max(end - place.column, 1)
    bar = f"{' ' * gutter} | "
    under = f"{bar}{' ' * place.column}{sign * width}"
    if len(under) + 1 + len(label) <= WIDTH:
        return [f"{place.line:>{gutter}} | {source}", f"{under} {label}"]
    return [f"{place.line:>{gutter}} | {source}", under, *_wrapped(bar + " " * min(place.column, 4), label)]


def _wrapped(head: str, words: str) -> list[str]:
    later = head if head.endswith("| ") or not head.strip(" |") else " " * len(head)
    return textwrap.wrap(words, WIDTH, initial_indent=head, subsequent_indent=later, break_long_words=False, break_on_hyphens=False) or [head]


def summary(report: Report) -> str:
    """The last thing printed: how many, and the most likely first."""
    found = report.findings
    rest = f"; {report.held_back} more of lower confidence, see --min-confidence" if report.held_back else ""
    if not found:
        return f"whynan: nothing found in {_files(report.files)}{rest}"
    counts = Counter(str(f.confidence) for f in found)
    levels = ", ".join(f"{counts[c]} {c}" for c in ("high", "medium", "low") if counts[c])
    head = f"whynan: {len(found)} finding{'s' * (len(found) != 1)} in {_files(len({f.path for f in found}))} (confidence: {levels}){rest}; most likely first:"
    lead = _wrapped("", head)
    ranked = sorted(found, key=lambda f: (-f.weight[0], -f.weight[1], f.path, f.place.line))
    lines = [f"  {f.confidence:<6} {f.code} {where(f)}  {f.title}" for f in ranked[:_SHOWN]]
    more = [f"  ... and {len(ranked) - _SHOWN} more"] if len(ranked) > _SHOWN else []
    return "\n".join([*lead, *lines, *more])


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def concise(report: Report) -> str:
    """One line a finding."""
    return "\n".join([*(f"{where(f)}: {f.code} {f.title} [{f.severity}, confidence {f.confidence}]" for f in report.findings), summary(report)])


def as_json(report: Report) -> str:
    """One object: findings, and what could not be read."""
    found = [_record(f) for f in sorted(report.findings, key=lambda f: (-f.weight[0], -f.weight[1], f.path, f.place.line))]
    data = {
        "schema": 1,
        "files": report.files,
        "lines": report.lines,
        "findings": found,
        "unreadable": [{"path": p, "reason": r} for p, r in report.trouble],
        "held_back": report.held_back,
    }
    return json.dumps(data, indent=1, allow_nan=False)


def _record(f: Finding) -> dict[str, object]:
    record: dict[str, object] = {
        "code": f.code,
        "slug": f.slug,
        "title": f.title,
        "label": f.label,
        "help": f.help,
        "note": f.note,
        "severity": str(f.severity),
        "confidence": str(f.confidence),
        "file": f.path,
        "cell": f.cell or None,
        "line": f.place.line,
        "column": f.place.column,
        "end_line": f.place.end_line,
        "end_column": f.place.end_column,
    }
    if f.origin is not None:
        record["origin"] = {"line": f.origin.line, "column": f.origin.column, "label": f.origin_label}
    if f.fix is not None:
        record["fix"] = {
            "safe": f.fix.safe,
            "edits": [
                {"line": e.place.line, "column": e.place.column, "end_line": e.place.end_line, "end_column": e.place.end_column, "text": e.text}
                for e in f.fix.edits
            ],
        }
    return record


def github(report: Report) -> str:
    """Annotations for GitHub Actions."""
    return "\n".join(_annotation(f) for f in report.findings)


def _annotation(f: Finding) -> str:
    level = "error" if f.confidence is Confidence.HIGH else "warning"
    file, title = _escaped(shown_path(f.path), True), _escaped(f"{f.code} {f.slug}", True)
    place = f"line={f.place.line},endLine={f.place.end_line},col={f.place.column + 1},endColumn={f.place.end_column + 1}"
    return f"::{level} file={file},{place},title={title}::{_escaped(f'{f.title}: {f.label}. {f.help}')}"


def _escaped(words: str, property_: bool = False) -> str:
    out = words.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return out.replace(":", "%3A").replace(",", "%2C") if property_ else out


def sarif(report: Report) -> str:
    """SARIF 2.1.0."""
    used = sorted({f.code for f in report.findings})
    driver = {"name": "whynan", "version": __version__, "informationUri": "https://pypi.org/project/whynan/", "rules": [_sarif_rule(c) for c in used]}
    failed = [
        {"level": "error", "message": {"text": f"{p}: {r}"}, "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(p)}}}]}
        for p, r in report.trouble
    ]
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_sarif_result(f, used) for f in report.findings],
        "invocations": [{"executionSuccessful": not report.trouble, "toolExecutionNotifications": failed}],
    }
    return json.dumps({"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}, indent=1, allow_nan=False)


def _sarif_rule(code: str) -> dict[str, object]:
    slug, severity = CODES[code]
    return {
        "id": code,
        "name": slug,
        "shortDescription": {"text": slug.replace("-", " ")},
        "help": {"text": f"whynan explain {code}"},
        "defaultConfiguration": {"level": _level(severity)},
    }


def _level(severity: Severity) -> str:
    return {"high": "error", "medium": "warning", "low": "note"}[severity]


def _sarif_result(f: Finding, used: list[str]) -> dict[str, object]:
    result: dict[str, object] = {
        "ruleId": f.code,
        "ruleIndex": used.index(f.code),
        "level": _level(f.severity),
        "message": {"text": f"{f.title}: {f.label}. {f.help}"},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": _uri(f.path)}, "region": _region(f.place)}}],
        "properties": {"confidence": str(f.confidence)},
    }
    if f.origin is not None:
        result["relatedLocations"] = [
            {"physicalLocation": {"artifactLocation": {"uri": _uri(f.path)}, "region": _region(f.origin)}, "message": {"text": f.origin_label}}
        ]
    return result


def _region(place: Place) -> dict[str, int]:
    return {"startLine": place.line, "startColumn": place.column + 1, "endLine": place.end_line, "endColumn": place.end_column + 1}


def _uri(path: str) -> str:
    return quote(os.fsencode(Path(_near(path)).as_posix()))


FORMATS: dict[str, Callable[[Report], str]] = {"text": text, "concise": concise, "json": as_json, "github": github, "sarif": sarif}
