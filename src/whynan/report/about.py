"""`run.json`: who wrote a run directory, from where in its files on, and how the run ended.

Written when the directory is first used and again at the end. A run directory without it is read as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from whynan import __version__
from whynan.records import Json, dumps

FILE = "run.json"


def begin(home: Path) -> None:
    """Say that a run writes here. What its files hold already is an earlier run's."""
    torch: Any = sys.modules.get("torch")
    facts: dict[str, Json] = {
        "schema": 1,
        "whynan": __version__,
        "torch": str(getattr(torch, "__version__", "")),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _now(),
        "from": {name: _size(home / name) for name in ("incidents.jsonl", "metrics.jsonl", "warnings.jsonl")},
    }
    with contextlib.suppress(OSError):
        _write(home, facts)


def finish(home: Path, steps: int, facts: Mapping[str, Json]) -> None:
    """Add how it ended and what was watched."""
    with contextlib.suppress(OSError):
        _write(home, {**read(home), "ended": _now(), "steps": steps, "watched": dict(facts)})


def read(home: Path) -> dict[str, Json]:
    """Return what `run.json` says; nothing where it is missing or not whole."""
    try:
        found = json.loads((home / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def running(facts: Mapping[str, Json]) -> bool:
    """Whether the run still goes on: not ended, and its process is alive where that can be seen."""
    pid = facts.get("pid")
    if "ended" in facts:
        return False
    if not isinstance(pid, int) or pid <= 0 or facts.get("host") != socket.gethostname():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8", errors="replace")
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _write(home: Path, facts: Mapping[str, Json]) -> None:
    replace_text(home / FILE, dumps(facts) + "\n")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
