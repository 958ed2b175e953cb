"""Numbers with names in lines that people print: `iter 100: loss 4.2034`, `| lm loss: 6.5E+00 |`, `{'grad_norm': nan}`.

A number is found first, then the name to its left. Nothing is evaluated; every step is linear in the line's length.
"""

from __future__ import annotations

import re

from whynan.forensics.logs.entries import MOST_NAME, Entry
from whynan.forensics.logs.names import Role, naming

_NUM = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|[nN]a[nN]|NAN|[iI]nf(?:inity)?|INF)"
_WRAP = r"(?:(?:tensor|array|np\.float\d+|numpy\.float\d+|float)\(\[?|\[)?"
_END = r"(?:ms|us|s|it|%|[kKMGT]i?B?|/s)?(?=$|[^\w:./-]|[.:,/-](?!\d))"
_PAIR = re.compile(rf"(?P<sep>[:=]\s{{0,12}}|\bis\s|\s[|]?\s{{0,40}})(?P<wrap>{_WRAP})['\"]?(?P<num>{_NUM}){_END}")
_WORDS = re.compile(r"(?:(?<=[^\w./@%-])|^)([A-Za-z_][\w./@%+-]*(?:\[[\w.]*\])?(?: [A-Za-z_(][\w./@()%+-]*){0,5})['\"]?\s*$")
_FILLERS = re.compile(r"^(?:(?:the|current|info|warning|error|debug|critical|at|and|with|has|rank|root|now)\s+)+", re.IGNORECASE)
_COUNT = r"(\d{1,3}(?:,\d{3})+(?!\d)|\d{1,18})"
_STEP = re.compile(
    rf"(?<![\w/])(global[_ ]?step|step|iteration|iter|num_updates|update|it|batch)s?['\"]?\s*[:=#]?\s*[\['\"]?\s*{_COUNT}(?![\d.])(?:\s*/\s*(\d+))?",
    re.IGNORECASE,
)
_EPOCH = re.compile(r"(?<![\w/])ep(?:och)?s?(?:\(\w+\))?['\"]?\s*[:=#]?\s*[\['\"]?\s*(\d{1,9}(?:\.\d+)?)(?!\d|:\d)|^Train: (\d{1,9})(?= \[)", re.IGNORECASE)
_COUNTER = re.compile(r"(?<![:=])(?:^|[|\[(\s])\s{0,12}(\d{1,15})\s?/\s{0,12}(\d{1,15})(?![\d/])")
_LEADING = re.compile(r"^\s*(?:(\d{1,9})\s+)?(\d{1,15})(?=\s|\s*\|)")
_PHASE = re.compile(r"(?<![\w./-])(?:val(?:id(?:ation)?)?|eval(?:uat\w+)?|test(?:ing)?)(?![\w./-])", re.IGNORECASE)
_WHEN = re.compile(r"(?: (?:at|after|in|for|on))? (?:step|iteration|iter|epoch|batch) \d+$", re.IGNORECASE)
_PLACES = frozenset({"epoch", "epochs", "ep", "step", "steps", "iter", "iters", "iteration"}) | {
    "iterations",
    "it",
    "global_step",
    "num_updates",
    "update",
    "updates",
    "batch",
    "train",
}
_INNER = frozenset({"batch"})
_BAR = re.compile(r"%\s?\||━|it/s|s/it|\bETA:|\[=*>")


def read_line(text: str, line: int) -> Entry | None:
    """Return what one line says, or None if it has no named number.

    >>> entry = read_line("iter 100: loss 4.2034, time 512.33ms", 7)
    >>> entry.step, entry.values
    (100, {'loss': 4.2034})
    >>> read_line("Epoch 3:  45%|####  | 123/273 [00:12<00:14, loss=nan]", 1).epoch
    3.0
    """
    values: dict[str, float] = {}
    begin = _fill(values, text)
    if not values:
        return None
    entry = Entry(line, values)
    _place(entry, text)
    if _PHASE.search(text, 0, begin):
        entry.values = {n if naming(n).validation else f"val/{n}": v for n, v in values.items()}
    return entry


def _fill(values: dict[str, float], text: str) -> int:
    """Put the named numbers of a line into `values`; return where the first name begins."""
    begin, end = len(text), 0
    for found in _PAIR.finditer(text):
        name = _name(text[max(end, found.start() - 100) : found.start()], found["sep"])
        if not name or _is_place(name):
            continue
        begin = min(begin, found.start() - len(name))
        end = found.end()
        values.setdefault(name[:MOST_NAME], float(found["num"].replace(",", "")))
    return begin


def _name(left: str, sep: str) -> str:
    if left[-1:] in ("'", '"'):
        return left[:-1].rsplit(left[-1], 1)[-1].strip()
    words = _WORDS.search(_WHEN.sub("", left).rsplit(". ", 1)[-1])
    if words is None:
        return ""
    name = _FILLERS.sub("", words[1]).strip()
    return name if sep[0] in ":=" else _spoken(name)


def _spoken(name: str) -> str:
    """Return the name before a number without a sign between them: only words known to be measured, or prose would be read as curves."""
    words = name.split(" ")
    for count in (2, 1):
        tail = " ".join(words[-count:])
        if len(words) >= count and (naming(tail).role is not Role.OTHER or _is_place(tail)):
            return tail if naming(words[-1]).role is not Role.OTHER or _is_place(words[-1]) or naming(tail).role is not Role.LOSS else ""
    return ""


def _is_place(name: str) -> bool:
    words = name.lower().replace("/", " ").split(" ")
    return words[-1] in _PLACES and all(w in _PLACES or w in ("trainer", "training", "global", "current", "val", "valid", "test") for w in words)


def _place(entry: Entry, text: str) -> None:
    """Find the step and the epoch of a line."""
    entry.live = _BAR.search(text) is not None
    epoch = _EPOCH.search(text)
    if epoch:
        entry.epoch = float(epoch[1] or epoch[2])
    for found in _STEP.finditer(text):
        if entry.step is None or found[1].lower().startswith("global"):
            entry.step = int(found[2].replace(",", ""))
            entry.total = int(found[3]) if found[3] and len(found[3]) < 18 else None
            entry.inner = found[1].lower() in _INNER or (entry.total is not None and epoch is not None)
    if entry.step is None:
        _count(entry, text, epoch)


def _count(entry: Entry, text: str, epoch: re.Match[str] | None) -> None:
    for found in _COUNTER.finditer(text):
        if epoch and found.start(1) <= epoch.start(epoch.lastindex or 1) < found.end(1):
            continue
        entry.step, entry.total, entry.inner = int(found[1]), int(found[2]), True
        return
    leading = None if epoch else _LEADING.match(text)
    if leading:
        entry.step = int(leading[2])
        entry.epoch, entry.inner = (float(leading[1]), True) if leading[1] else (None, False)
