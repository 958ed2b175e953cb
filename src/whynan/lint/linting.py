"""From paths to findings."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from whynan.lint.files import Source, Unreadable, discover, read
from whynan.lint.findings import Edit, Finding, Fix, Place
from whynan.lint.model import Module, Project, parse
from whynan.lint.settings import Settings
from whynan.lint.values import Values
from whynan.lint.walk import Walk
from whynan.resting import no_collector

_IGNORE = re.compile(r"#\s*whynan:\s*ignore(?:\[([\w\s,-]+)\])?")


@dataclass(slots=True)
class Report:
    """What a run found."""

    findings: list[Finding] = field(default_factory=list)
    trouble: list[tuple[str, str]] = field(default_factory=list)  # (path, why it could not be looked at)
    files: int = 0
    lines: int = 0
    held_back: int = 0  # findings below the asked confidence
    texts: dict[tuple[str, int], str] = field(default_factory=dict)  # the sources that have findings, by path and cell

    @property
    def status(self) -> int:
        """The exit status: 0 nothing found, 1 findings, 2 something could not be read."""
        return 2 if self.trouble else 1 if self.findings else 0


def lint_paths(paths: list[Path], settings: Settings | None = None) -> Report:
    """Look at files and folders.

    **Cost:** about 20 µs a line; files that never mention torch are read and not parsed.
    """
    settings = settings or Settings()
    report = Report()
    files = list(discover(paths, settings, report.trouble))
    project = Project(files)
    with no_collector():  # it visits every syntax tree again: without it parsing is three times as fast
        for path in files:
            report.files += 1
            _take(report, path, settings, project)
    report.findings.sort(key=lambda f: (f.path, f.cell, f.place.line, f.place.column, f.code))
    report.trouble.sort()
    return report


def _take(report: Report, path: Path, settings: Settings, project: Project) -> None:
    try:
        sources = read(path)
    except Unreadable as why:
        report.trouble.append((str(path), str(why)))
        return
    before = ""
    for source in sources:
        report.lines += source.text.count("\n") + 1
        found, why_not = lint_source(source, project, before)
        if source.cell:
            before += "\n".join(line for line in source.text.splitlines() if line.startswith(("import ", "from "))) + "\n"
        if why_not:
            report.trouble.append((f"{path}, cell {source.cell}" if source.cell else str(path), why_not))
        kept = [f for f in found if settings.keeps(f)]
        report.held_back += sum(settings.wants(f.code) and f.confidence.rank < settings.min_confidence.rank for f in found)
        if kept:
            report.texts[str(path), source.cell] = source.text
        report.findings.extend(kept)


def lint_text(text: str, path: Path = Path("<text>"), settings: Settings | None = None) -> list[Finding]:
    """Look at one piece of source.

    >>> found = lint_text("import torch; p = lambda x: torch.log(torch.softmax(x, -1))")
    >>> [(f.code, f.place.line) for f in found]
    [('WN101', 1)]
    """
    settings = settings or Settings()
    return [f for f in lint_source(Source(path, text), Project())[0] if settings.keeps(f)]


def lint_source(source: Source, project: Project, imports: str = "") -> tuple[list[Finding], str]:
    """Return the findings of a source and, where it could not be parsed, the reason."""
    try:
        tree = parse(source.text)
        module = Module(source.path, source.text, tree, project)
        if imports:
            module.imports = {**Module(source.path, imports, parse(imports)).imports, **module.imports}
        found = Walk(module, Values()).run()
        module.release()
    except SyntaxError as error:
        return [], f"syntax error{f' in line {error.lineno}' if error.lineno else ''}: {error.msg}"
    except (ValueError, MemoryError) as error:
        return [], f"cannot be parsed: {error or 'out of memory'}"
    except RecursionError:
        return [], "nested too deeply to be looked at"
    except Exception as error:  # one file never keeps the others from being looked at
        return [], f"a fault of whynan's own, please report it: {type(error).__name__}: {error}"
    return _unsuppressed(_distinct(found), source), ""


def _in_characters(finding: Finding, lines: list[str]) -> Finding:
    """The parser counts columns in bytes; people and editors count characters."""

    def moved(p: Place) -> Place:
        return Place(p.line, _column(lines, p.line, p.column), p.end_line, _column(lines, p.end_line, p.end_column))

    fix = finding.fix and Fix(tuple(Edit(moved(e.place), e.text) for e in finding.fix.edits), finding.fix.safe)
    return replace(finding, place=moved(finding.place), origin=finding.origin and moved(finding.origin), fix=fix)


def _column(lines: list[str], line: int, column: int) -> int:
    written = lines[line - 1] if line <= len(lines) else ""
    return column if written.isascii() else len(written.encode()[:column].decode(errors="ignore"))


def _distinct(found: list[Finding]) -> list[Finding]:
    """One finding a code and place, the surest."""
    best: dict[tuple[str, Place], Finding] = {}
    for finding in found:
        key = (finding.code, finding.place)
        if key not in best or finding.weight > best[key].weight:
            best[key] = finding
    return list(best.values())


def _unsuppressed(found: list[Finding], source: Source) -> list[Finding]:
    lines = source.text.split("\n") if found else []
    kept = [replace(f, cell=source.cell) for f in found if not _suppressed(f, lines)]
    return kept if source.text.isascii() else [_in_characters(f, lines) for f in kept]


def _suppressed(finding: Finding, lines: list[str]) -> bool:
    """Whether a comment on one of the finding's lines says to leave it."""
    for line in lines[finding.place.line - 1 : finding.place.end_line]:
        match = _IGNORE.search(line)
        if match and (match[1] is None or {finding.code, finding.slug} & {c.strip() for c in match[1].split(",")}):
            return True
    return False
