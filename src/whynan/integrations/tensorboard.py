"""TensorBoard: every open `SummaryWriter`, of torch or of tensorboardX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whynan.integrations.telling import Telling, living

_LONGEST = 100_000  # characters of a report; a page is not text for this


def find() -> list[Any]:
    """Return the writers that are open."""
    writers = [*living("torch.utils.tensorboard.writer", "SummaryWriter"), *living("tensorboardX.writer", "SummaryWriter")]
    return [writer for writer in writers if _is_open(writer)]


def _is_open(writer: Any) -> bool:
    return getattr(writer, "all_writers", None) is not None  # a closed one would begin a new file


def tell(run: Any, telling: Telling) -> None:
    """Write the values and the diagnosis at the step of the incident."""
    step = telling.incident.step
    for key, value in telling.numbers().items():
        run.add_scalar(key, value, step)
    if telling.alert:
        run.add_text("whynan/alert", f"{telling.title}\n\n```\n{telling.diagnosis}\n```", step)
    run.flush()


def attach(run: Any, report: Path) -> None:
    """Write the report as text."""
    text = report.with_suffix(".md")
    if _is_open(run) and text.exists():
        run.add_text("whynan/report", text.read_text(encoding="utf-8")[:_LONGEST])
        run.flush()
