"""When a printed line was written: `iter 100:`, `Epoch [3/10], Step [100/600]`, `45%|####  | 123/273`, `Train: 0 [ 100/1251]`."""

from __future__ import annotations

import re

from whynan.forensics.logs.entries import Entry

# Patterns begin with a letter and what stands before it is looked at afterwards: three times as fast as looking behind at every letter.
_SIGN = r"s?['\"]?\s{0,12}(?:[:=#]\s{0,12})?(?:[\['\"]\s{0,12})?"
_COUNT = r"(\d{1,3}(?:,\d{3})+(?!\d)|\d{1,18})"
_WORD = r"([gG]lobal[_ ]?[sS]tep|[sS]tep|STEP|[iI]ter(?:ation)?|ITER|[nN]um_updates|[uU]pdate|[iI]t|[bB]atch)"
_STEP = re.compile(rf"{_WORD}{_SIGN}{_COUNT}(?![\d.])(?:\s{{0,12}}/\s{{0,12}}(\d{{1,18}}))?")
_EPOCH = re.compile(rf"(?:[eE]p(?:och)?|EPOCH)(?:\(\w{{1,9}}\))?{_SIGN}(\d{{1,9}}(?:\.\d{{1,18}})?)(?!\d|:\d)")
_TRAIN = re.compile(r"Train: (\d{1,9})(?= \[)")
_COUNTER = re.compile(r"(\d{1,15})\s?/\s{0,12}(\d{1,15})(?![\d/])")
_LEADING = re.compile(r"\s{0,40}(?:(\d{1,9})\s{1,12})?\[?(\d{1,15})\]?(?=\s)")
_BARS = ("%|", "% |", "━", "it/s", "s/it", "ETA:", "[=", "[>")


def place(entry: Entry, text: str) -> None:
    """Find the step and the epoch of a line."""
    entry.live = any(bar in text for bar in _BARS)
    epoch = next((m for m in _EPOCH.finditer(text) if _begins(text, m)), None) or _TRAIN.match(text)
    if epoch:
        entry.epoch = float(epoch[1])
    steps = (m for m in _STEP.finditer(text) if _begins(text, m))
    step = next(steps, None)
    if step is not None and "lobal" in text:
        step = next((m for m in steps if m[1][1:6] == "lobal"), step)
    if step is None:
        _count(entry, text, epoch)
        return
    entry.step = int(step[2].replace(",", ""))
    entry.total = int(step[3]) if step[3] else None
    entry.inner = step[1][1:] == "atch" or (entry.total is not None and epoch is not None)


def _begins(text: str, found: re.Match[str]) -> bool:
    """Whether a match is a word of its own, not the end of another."""
    before = text[found.start() - 1] if found.start() else " "
    return not (before.isalnum() or before in "_/")


def _count(entry: Entry, text: str, epoch: re.Match[str] | None) -> None:
    for found in _COUNTER.finditer(text) if "/" in text else ():
        if _stands_alone(text, found) and not (epoch and found.start(1) <= epoch.start(1) < found.end(1)):
            entry.step, entry.total, entry.inner = int(found[1]), int(found[2]), True
            return
    leading = None if epoch else _LEADING.match(text)
    if leading:
        entry.step = int(leading[2])
        entry.epoch, entry.inner = (float(leading[1]), True) if leading[1] else (None, False)


def _stands_alone(text: str, found: re.Match[str]) -> bool:
    """Whether N/M is a counter: not part of a date, and not a measured share as in `Accuracy: 98/100`."""
    left = text[max(0, found.start() - 16) : found.start()]
    return not left or (left[-1] in "|[( \t" and left.rstrip(" \t")[-1:] not in (":", "="))
