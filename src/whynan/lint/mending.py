"""Fixes over a whole report: what they change, file by file, written or only shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from whynan.lint import fixes
from whynan.lint.linting import Report


@dataclass(slots=True)
class Changes:
    """What the fixes of a report change."""

    count: int = 0
    files: int = 0
    diff: str = ""
    trouble: list[tuple[str, str]] = field(default_factory=list)  # (path, why it could not be written)


def mend(report: Report, unsafe: bool, write: bool) -> Changes:
    """Apply the fixes of a report to its files, or only work out the diff.

    Unsafe fixes are those that change results where the hazard strikes.
    """
    changes = Changes()
    for path, findings in fixes.wanted(report.findings, unsafe).items():
        before = report.texts[path, 0]
        after, count = fixes.mended(before, findings)
        if not count or after == before:
            continue
        if write:
            try:
                fixes.write(Path(path), before, after)
            except (OSError, UnicodeError) as error:
                changes.trouble.append((path, f"cannot be written: {(getattr(error, 'strerror', None) or str(error)).lower()}"))
                continue
        changes.count += count
        changes.files += 1
        changes.diff += fixes.diff(path, before, after)
    return changes
