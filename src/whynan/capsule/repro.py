"""Write `repro.py`."""
from __future__ import annotations
from pathlib import Path
from whynan.records import Json


def write(folder: Path, program: dict[str, Json], incident: dict[str, Json]) -> None:
    """Write it."""
