"""Finding and reading source: Python files and notebooks; what cannot be read is one line, the rest goes on."""

from __future__ import annotations

import io
import json
import os
import stat
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from whynan.lint.settings import Settings

_LARGEST = 20_000_000


class Unreadable(Exception):
    """A file that cannot be looked at, with the reason."""


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a file, or of one cell of a notebook."""

    path: Path
    text: str
    cell: int = 0


def discover(paths: list[Path], settings: Settings, trouble: list[tuple[str, str]]) -> Iterator[Path]:
    """Yield the files below some paths, each once, in order; links that lead back are not followed twice."""
    seen: set[tuple[int, int]] = set()
    for path in paths:
        try:
            status = path.stat()
        except OSError as error:
            trouble.append((str(path), _reason(error)))
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from _below(path, settings, seen, trouble)
        elif not stat.S_ISREG(status.st_mode):
            trouble.append((str(path), "not a regular file"))
        else:
            yield path


def _below(folder: Path, settings: Settings, seen: set[tuple[int, int]], trouble: list[tuple[str, str]]) -> Iterator[Path]:
    def failed(error: OSError) -> None:
        trouble.append((str(error.filename), _reason(error)))

    for name, folders, files in os.walk(folder, onerror=failed, followlinks=True):
        here = Path(name)
        status = here.stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            if here.is_symlink() and here.absolute().is_relative_to(here.resolve()):
                trouble.append((str(here), "a link to a folder above it: not followed"))
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(f for f in folders if not settings.skips(here / f))
        for file in sorted(files):
            path = here / file
            if not file.endswith((".py", ".ipynb")) or settings.skips(path):
                continue
            try:
                regular = stat.S_ISREG(path.stat().st_mode)
            except OSError as error:
                trouble.append((str(path), _reason(error)))
                continue
            if regular:
                yield path
            else:
                trouble.append((str(path), "not a regular file"))


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def read(path: Path) -> list[Source]:
    """Read a file; a notebook gives one source a cell. Files that never mention torch give none."""
    try:
        if path.stat().st_size > _LARGEST:
            raise Unreadable(f"larger than {_LARGEST // 1_000_000} MB: not looked at")
        raw = path.read_bytes()
    except OSError as error:
        raise Unreadable(_reason(error)) from None
    if b"torch" not in raw:
        return []
    if path.suffix == ".ipynb":
        return _cells(path, raw)
    return [Source(path, decode(raw))]


def decode(raw: bytes) -> str:
    """The text of a Python file in the encoding it declares."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except (SyntaxError, LookupError) as error:
        raise Unreadable(f"encoding: {error}") from None
    except UnicodeDecodeError as error:
        raise Unreadable(f"not {error.encoding}: byte 0x{raw[error.start]:02x} at {error.start}; declare the encoding in the first line") from None


def _cells(path: Path, raw: bytes) -> list[Source]:
    try:
        book = json.loads(raw)
        cells = book["cells"]
        texts = ["".join(c["source"]) if c.get("cell_type") == "code" else "" for c in cells]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unreadable("not a notebook: no cells in it") from None
    return [Source(path, _plain(text), number) for number, text in enumerate(texts, 1) if text.strip()]


def _plain(text: str) -> str:
    """A cell without the lines that are IPython's and not Python's."""
    lines = text.split("\n")
    if lines[0].startswith("%%"):
        return "" if not lines[0].startswith(("%%time", "%%capture")) else "\n".join(["", *lines[1:]])
    return "\n".join("pass" if not line[:1].isspace() and line.startswith(("%", "!", "?")) else line for line in lines)
