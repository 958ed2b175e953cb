"""Where each setting of a YAML, TOML or JSON file stands: nothing but the value is ever touched, so comments and layout stay.

The file is scanned, not loaded: no YAML library is needed, and a file that only nearly follows its format is still read as far as it goes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_BYTES = 256 << 10
FORMS = {".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json"}
_YAML_KEY = re.compile(r"(?P<indent>(?:\s|- )*)(?P<quote>[\"']?)(?P<key>[\w./-]+)(?P=quote)\s*:(?:\s+(?P<rest>.*))?$")
_TOML_KEY = re.compile(r"(?P<indent>\s*)(?P<quote>[\"']?)(?P<key>[\w.-]+)(?P=quote)\s*=\s*(?P<rest>.*)$")
_TOML_TABLE = re.compile(r"\s*\[{1,2}\s*([^\[\]]+?)\s*\]{1,2}\s*(?:#.*)?$")
_TOKEN = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|[{}\[\],]|[:=](?=\s|[\"'\[{]|$)|=|[^\s{}\[\],=:#\"'](?:[^{}\[\],=:#\n]|:(?!\s))*|#.*")
_ANCHOR = re.compile(r"(?:[&!]\S+\s+)+")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value of one file, by the place of its text."""

    sections: tuple[str, ...]
    key: str
    text: str  # as written, with its quotes
    line: int  # 0-based
    start: int
    end: int
    alone: bool = True  # nothing else stands on its line

    @property
    def word(self) -> str:
        """The value without quotes."""
        return self.text.strip("\"'").strip()

    @property
    def number(self) -> float | None:
        """The value as a number; None where it is none."""
        try:
            return float(self.word.replace("_", ""))
        except ValueError:
            return None

    @property
    def off(self) -> bool:
        """Whether the value says: not at all."""
        return self.word.lower() in ("", "null", "none", "~", "false", "off", "no") or self.number == 0


@dataclass(frozen=True, slots=True)
class Layout:
    """A file, and where its settings stand."""

    file: Path
    form: str
    lines: tuple[str, ...]  # with their ends
    settings: tuple[Setting, ...]


def read_layout(file: Path) -> Layout | None:
    """Read a file; None where it is too large, no text, or of no form we know."""
    form = FORMS.get(file.suffix.lower())
    try:
        if form is None or not file.is_file() or file.stat().st_size > MOST_BYTES:
            return None
        text = file.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    lines = tuple(text.splitlines(keepends=True))
    scan = {"yaml": _yaml, "toml": _toml, "json": _json}[form]
    return Layout(file, form, lines, tuple(scan(lines)))


def _yaml(lines: tuple[str, ...]) -> Iterator[Setting]:
    sections: list[tuple[int, str]] = []
    block = -1  # the indent of a key whose value is a block of text
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip() or line.lstrip().startswith("#") or (block >= 0 and indent > block):
            continue
        block = -1
        found = _YAML_KEY.match(line.rstrip("\r\n"))
        if found is None:
            continue
        indent = len(found["indent"])
        while sections and sections[-1][0] >= indent:
            sections.pop()
        rest = _uncommented(found["rest"] or "")
        names = tuple(name for _, name in sections)
        anchor = _ANCHOR.match(rest + " ")
        start = found.start("rest") + (min(anchor.end(), len(rest)) if anchor else 0) if rest else 0
        rest = line[start : found.start("rest") + len(rest)] if rest else ""
        if not rest:
            sections.append((indent, found["key"]))
        elif rest[0] in "|>":
            block = indent
        elif rest[0] in "{[":
            yield from _flow([(number, start, rest)], (*names, found["key"]))
        else:
            yield Setting(names, found["key"], rest, number, start, start + len(rest))


def _toml(lines: tuple[str, ...]) -> Iterator[Setting]:
    sections: tuple[str, ...] = ()
    inside = ""  # the quotes of a text over several lines
    for number, line in enumerate(lines):
        if inside:
            inside = "" if inside in line else inside
            continue
        table = _TOML_TABLE.match(line)
        found = None if table else _TOML_KEY.match(line.rstrip("\r\n"))
        if table:
            sections = tuple(part.strip("\"' ") for part in table[1].split("."))
        if found is None or line.lstrip().startswith("#"):
            continue
        rest, start = _uncommented(found["rest"]), found.start("rest")
        *more, key = found["key"].split(".")
        inside = next((q for q in ('"""', "'''") if rest.startswith(q) and rest.count(q) == 1), "")
        if rest[:1] in ("{", "["):
            yield from _flow([(number, start, rest)], (*sections, *more, key))
        elif rest and not inside:
            yield Setting((*sections, *more), key, rest, number, start, start + len(rest))


def _json(lines: tuple[str, ...]) -> Iterator[Setting]:
    yield from _flow([(number, 0, line.rstrip("\r\n")) for number, line in enumerate(lines)], ())


def _flow(pieces: list[tuple[int, int, str]], outer: tuple[str, ...]) -> Iterator[Setting]:
    """Yield the settings of mappings in braces."""
    depth: list[str] = []  # the key that opened each bracket
    last = key = ""
    each_alone = len(pieces) > 1
    for line, offset, text in pieces:
        for token in _TOKEN.finditer(text):
            word = token[0].rstrip()
            if word in ("{", "["):
                depth.append(key)
                last = key = ""
            elif word in ("}", "]"):
                key = depth.pop() if depth else ""
                last = key = ""
            elif word in (":", "="):
                key = last
            elif word == ",":
                last = key = ""
            elif key:
                alone = each_alone and text.count(",") <= 1 and not set("{[") & set(text)
                names = (*outer, *(d for d in depth if d))
                yield Setting(names, key, word, line, offset + token.start(), offset + token.start() + len(word), alone)
            elif not word.startswith("#"):
                last = word.strip("\"'")


def _uncommented(text: str) -> str:
    """Cut a comment off: a `#` at the beginning or after a space, outside of quotes."""
    quote = ""
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (at == 0 or text[at - 1].isspace()):
            return text[:at].rstrip()
    return text.rstrip()


def written(value: float, like: str) -> str:
    """Write a number in the manner of the text it replaces; one with an exponent also has a dot, or YAML 1.1 would read it as text.

    >>> written(0.002, "4.0e-3"), written(0.5, "1.0"), written(200, "10"), written(2e-05, "1e-4")
    ('2.0e-3', '0.5', '200', '2.0e-5')
    """
    if float(value).is_integer() and abs(value) < 1e6:
        return str(int(value)) if not re.search(r"[.eE]", like) else f"{value:.1f}"
    if "e" not in like.lower() and 1e-4 <= abs(value) < 1e6:
        return f"{value:.6g}"
    mantissa, power = f"{value:.3e}".split("e")
    mantissa = mantissa.rstrip("0")
    return f"{mantissa}{'0' if mantissa.endswith('.') else ''}e{int(power)}"
