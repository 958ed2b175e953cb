"""The report of `whynan check`: for a terminal, as JSON, as annotations on GitHub."""

from __future__ import annotations

from whynan.forensics.findings import Report


def text(report: Report) -> str:
    """Return the report for a terminal, 80 columns wide."""
    lines: list[str] = []
    for checked in report.checked:
        lines.append(f"{checked.path}: {checked.unreadable or checked.form}")
        lines += [f"  {finding}" for finding in checked.findings]
    return "\n".join(lines)
