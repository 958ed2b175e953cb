"""Numbers with names in lines that people print: `iter 100: loss 4.2034`, `| lm loss: 6.5E+00 |`, `{'grad_norm': nan}`.

A number is found first, then the name to its left. Nothing is evaluated; every step is linear in the line's length.
"""

from __future__ import annotations

import re
from functools import lru_cache

from whynan.forensics.logs.entries import MOST_NAME, Entry
from whynan.forensics.logs.names import Role, naming
from whynan.forensics.logs.placing import place

_POWER = r"(?:[eE][-+]?\d{1,4})?"
_NUM = (
    rf"[-+]?(?:\d{{1,3}}(?:,\d{{3}}){{1,6}}(?![\d,])(?:\.\d{{1,40}})?|\d{{1,40}}\.?\d{{0,40}}{_POWER}|\.\d{{1,40}}{_POWER}|[nN]a[nN]|NAN|[iI]nf(?:inity)?|INF)"
)
_WRAP = r"(?:(?:tensor|array|np\.float\d+|numpy\.float\d+|float)\(\[?|\[)?"
_END = r"(?:ms|us|s|it|%|[kKMGT]i?B?|/s)?(?=$|[^\w:./-]|[.:,/-](?!\d))"
_PAIR = re.compile(rf"(?P<sep>[:=]\s{{0,12}}| is\s|\s[|]?\s{{0,40}})(?P<wrap>{_WRAP})['\"]?(?P<num>{_NUM}){_END}")
_WORDS = re.compile(r"(?:(?<=[^\w./@%-])|^)([A-Za-z_][\w./@%+-]*(?:\[[\w.]*\])?(?: [A-Za-z_(][\w./@()%+-]*){0,5})['\"]?\s*$")
_FILLERS = re.compile(r"^(?:(?:the|current|info|warning|error|debug|critical|at|and|with|has|rank|root|now)\s+)+", re.IGNORECASE)
_PHASE = re.compile(r"(?<![\w./-])(?:val(?:id(?:ation)?)?|eval(?:uat\w+)?|test(?:ing)?)(?![\w./-])", re.IGNORECASE)
_WHEN = re.compile(r"(?: (?:at|after|in|for|on))? (?:step|iteration|iter|epoch|batch) \d+$", re.IGNORECASE)
_PLACES = frozenset({"epoch", "epochs", "ep", "step", "steps", "iter", "iters", "iteration", "iterations", "it", "global_step", "train"})
_PLACES |= {"num_updates", "update", "updates", "batch"}


_STOPS = frozenset("|,;[{(<>:=-+*/\\")  # what no name ends in


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
    place(entry, text)
    if _PHASE.search(text, 0, begin):
        entry.values = {n if naming(n).validation else f"val/{n}": v for n, v in values.items()}
    return entry


def _fill(values: dict[str, float], text: str) -> int:
    """Put the named numbers of a line into `values`; return where the first name begins."""
    begin, end = len(text), 0
    for found in _PAIR.finditer(text):
        left = text[max(end, found.start() - 100) : found.start()].rstrip()
        sep = found["sep"][0]
        if not left or left[-1] in _STOPS or (sep not in ":=" and not _speaks(left[left.rfind(" ") + 1 :])):
            continue
        name = _name(left[max(left.rfind("|"), left.rfind(","), left.rfind("{")) + 1 :], sep)
        if not name:
            continue
        begin = min(begin, found.start() - len(name))
        end = found.end()
        number = found["num"]
        values.setdefault(name, float(number if "," not in number else number.replace(",", "")))
    return begin


@lru_cache(maxsize=8192)
def _name(left: str, sep: str) -> str:
    """Return the name at the end of the text before a number; empty where it is none, or says when and not what."""
    if left[-1:] in ("'", '"'):
        name = left[:-1].rsplit(left[-1], 1)[-1].strip()
    else:
        words = _WORDS.search(_WHEN.sub("", left).rsplit(". ", 1)[-1])
        name = _FILLERS.sub("", words[1]).strip() if words else ""
        name = name if sep in ":=" else _spoken(name)
    return "" if _is_place(name) or name.endswith((".py", ".cpp", ".cc", ".cu")) else name[:MOST_NAME]  # `train.py:53` is where, not what


@lru_cache(maxsize=8192)
def _speaks(word: str) -> bool:
    """Whether a word may end the name of a number without a sign between them: in prose most do not, and are passed over at once."""
    return naming(word).role is not Role.OTHER or word.lower() == "rate"


def _spoken(name: str) -> str:
    """Return the name before a number without a sign between them: only words known to be measured, or prose would be read as curves."""
    words = name.split(" ")
    tails = (" ".join(words[-2:]), words[-1])
    return next((tail for tail in tails if naming(tail).role is not Role.OTHER), "")


def _is_place(name: str) -> bool:
    words = name.lower().replace("/", " ").split(" ")
    return words[-1] in _PLACES and all(w in _PLACES or w in ("trainer", "training", "global", "current", "val", "valid", "test") for w in words)
