"""Small JSON files beside a checkpoint, read within limits."""

from __future__ import annotations

import json

from whynan.forensics.addresses import NotLookedAt, Place, Unreadable
from whynan.forensics.checkpoints.sources import Source

_LONGEST = 64 << 20
_MOST_OBJECTS = 1_000_000


def read_json(place: Place) -> dict[str, object]:
    """Return the object a JSON file holds; raises `Unreadable`."""
    source = Source.of(place)
    if source.size > _LONGEST:
        raise NotLookedAt(f"a JSON file of {source.size} bytes is larger than is looked at")
    data = source.read(0, source.size)
    if data.count(b"{") + data.count(b"[") > _MOST_OBJECTS:
        raise NotLookedAt("a JSON file with too many objects to be looked at")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise Unreadable("not valid JSON") from None
    if not isinstance(found, dict):
        raise Unreadable("not a JSON object")
    return found
