"""Which kind of log a file is, by its content, and the reader for it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import IO

from whynan.forensics.logs.entries import Entry, entry_of
from whynan.forensics.logs.events import event_entries, is_event_file
from whynan.forensics.logs.grammar import read_line
from whynan.forensics.logs.lines import lines, plain, strokes
from whynan.forensics.logs.names import Role, naming
from whynan.forensics.logs.objects import listed_objects, object_lines
from whynan.forensics.logs.offline import HEADER, offline_entries
from whynan.forensics.logs.tables import is_header, rows
from whynan.forensics.text import encoding_of
from whynan.forensics.wishes import Tick

HEAD = 1 << 16
OFTEN = 3  # times that something is written before text is taken for a log
_TRAINED = (Role.LOSS, Role.NORM, Role.RATE)


class Form(StrEnum):
    """The kinds of logs."""

    EVENTS = "TensorBoard events"
    OFFLINE = "W&B offline run"
    HISTORY = "Trainer state"
    LIST = "JSON list"
    LINES = "JSON lines"
    TABLE = "CSV"
    TEXT = "text log"


def text_entries(file: IO[bytes], tick: Tick) -> Iterator[Entry | None]:
    """Yield an entry for every line, or drawing of a progress bar, that has named numbers."""
    for number, line in lines(file, tick):
        entry = read_line(plain(line), number)
        if entry is not None:
            yield entry


READERS: dict[Form, Callable[[IO[bytes], Tick], Iterator[Entry | None]]] = {
    Form.EVENTS: event_entries,
    Form.OFFLINE: offline_entries,
    Form.HISTORY: listed_objects,
    Form.LIST: listed_objects,
    Form.LINES: object_lines,
    Form.TABLE: rows,
    Form.TEXT: text_entries,
}


def form_of_file(file: IO[bytes], often: int = 1) -> Form | None:
    """Tell the form of a log from its first 64 KB, or from its last where a long preamble says nothing; None where it is no log.

    Text is one where a series has `often` growing steps.
    """
    head = file.read(HEAD)
    form = form_of(head, often)
    if form is not None or len(head) < HEAD or b"\0" in head:
        return form
    file.seek(-min(HEAD, file.seek(0, 2)), 2)
    return Form.TEXT if _is_text_log(file.read(HEAD).decode("utf-8", "replace").split("\n")[1:], often) else None


def form_of(head: bytes, often: int = 1) -> Form | None:
    """Tell the form of a log from its first 64 KB; None where it is no log."""
    if head.startswith(HEADER):
        return Form.OFFLINE
    if is_event_file(head):
        return Form.EVENTS
    encoding = encoding_of(head) or "utf-8"
    if encoding[:6] != "utf-16" and b"\0" in head:
        return None
    return _form_of_text(head.decode(encoding, "replace").lstrip("\ufeff"), often)


def _form_of_text(text: str, often: int) -> Form | None:
    start = text.lstrip()[:1]
    if start == "{" and '"log_history"' in text:
        return Form.HISTORY
    whole = text.splitlines()[: -1 if len(text) >= HEAD // 4 else None]
    if start == "[" and _is_list(text):
        return Form.LIST
    header = next((line for line in whole if line.strip()), "")
    if _is_incident(header):
        return None
    if _is_object_lines(whole):
        return Form.LINES
    if "{" not in header and is_header(header):
        return Form.TABLE
    return Form.TEXT if _is_text_log(whole, often) else None


def _is_incident(line: str) -> bool:
    """Whether a line is of whynan's own incidents, warnings or `run.json`: what it tells is known already."""
    return line.startswith("{") and '"schema"' in line and any(word in line for word in ('"symptom"', '"severe"', '"watched"', '"whynan"'))


def _is_log_entry(entry: Entry) -> bool:
    roles = {naming(n).role for n in entry.values}
    timed = entry.step is not None or entry.epoch is not None
    return bool(roles & set(_TRAINED)) or (timed and bool(entry.values))


def _is_list(text: str) -> bool:
    try:
        found, _ = json.JSONDecoder().raw_decode(text.lstrip()[1:].lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and _is_log_entry(entry_of(found))


def _is_object_lines(whole: list[str]) -> bool:
    """Whether most lines are JSON objects, and one in ten of those, or more, has something of a training in it."""
    full = [line for line in whole if line.strip()][:200]
    found = []
    for line in full:
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            continue
    objects = [f for f in found if isinstance(f, dict)]
    return bool(objects) and 2 * len(objects) > len(full) and 10 * sum(_is_log_entry(entry_of(f)) for f in objects) >= len(objects)


def _is_text_log(whole: list[str], often: int) -> bool:
    """Whether a loss or a norm is written again and again, or with steps that grow; notes, a source file or a configuration do neither.

    Where no name is known, the same few names with a step, again and again, make a log too: `(epoch: 1, iters: 100) D_A: 1.016, G_A: 1.631`.
    """
    grown: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    last: dict[str, tuple[float, float]] = {}
    for entry in (read_line(plain(stroke), 0) for line in whole for stroke in strokes(line)):
        if entry is None:
            continue
        names = [n for n in entry.values if naming(n).role in (Role.LOSS, Role.NORM)]
        timed = entry.step is not None or entry.epoch is not None
        if not timed:
            seen.update(names)
            continue
        when = (entry.epoch or 0.0, float(entry.step or 0))
        for name in (*names, " ".join(entry.values)) if len(entry.values) > 1 else names:
            grown[name] += when > last.get(name, (-1.0, -1.0))
            last[name] = when
        if any(grown[n] >= often for n in names):
            return True
    return any(times >= OFTEN for times in (seen | grown).values())
