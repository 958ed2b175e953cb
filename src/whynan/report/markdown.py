"""The run as Markdown, for pasting into an issue."""

from __future__ import annotations

from whynan.records import Incident, number
from whynan.report import terminal


def render(incidents: list[Incident], history: list[dict[str, float]], steps: int) -> str:
    """Return the report."""
    parts = ["# whynan report", "", f"{len(incidents)} incident{'s' if len(incidents) != 1 else ''} in {steps} steps.", ""]
    parts += ["| step | code | cause | place | action |", "|---|---|---|---|---|"]
    for incident in incidents:
        span = incident.origin.span
        place = f"`{span.place}`" if span.known else "not known"
        parts.append(f"| {incident.step} | {incident.cause.code} | {incident.cause.title} | {place} | {incident.action.taken} |")
    seen: set[tuple[str, str, int]] = set()
    for incident in incidents:
        key = (incident.cause.code, incident.origin.span.file, incident.origin.span.line)
        if key not in seen:
            seen.add(key)
            parts += ["", *_one(incident)]
    parts += ["", *_curve(history)]
    return "\n".join(parts) + "\n"


def _one(incident: Incident) -> list[str]:
    parts = [f"## Step {incident.step}: {incident.cause.title} ({incident.cause.code}, {incident.cause.confidence})", ""]
    parts += ["```text", terminal.diagnosis(incident), "```"]
    if incident.experiments:
        parts += ["", "Tried on the replay:", ""]
        parts += [f"- {e.question}: {e.answer}" for e in incident.experiments]
    for remedy in incident.remedies:
        if remedy.diff:
            parts += ["", f"{remedy.title} ({remedy.result}: {remedy.effect})", "", "```diff", remedy.diff.rstrip("\n"), "```"]
    return parts


def _curve(history: list[dict[str, float]]) -> list[str]:
    rows = history[-12:]
    if not rows:
        return []
    parts = ["## The last steps", "", "| step | loss | gradient norm | learning rate |", "|---|---|---|---|"]
    for row in rows:
        cells = [number(row[k]) if k in row else "" for k in ("loss", "grad_norm", "lr")]
        parts.append(f"| {int(row['step'])} | {cells[0]} | {cells[1]} | {cells[2]} |")
    return parts
