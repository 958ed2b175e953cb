"""Data sets as people keep them, written by the libraries people use."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.data import check_data
from whynan.forensics.findings import Checked, Finding, Severity
from whynan.forensics.wishes import Wishes


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def look(path: Path | str, **wishes: Any) -> Checked:
    return check_data(Place.of(path), Wishes(**wishes))


def why(path: Path | str, **wishes: Any) -> str:
    """The one line that says why a file cannot be read, whichever way it is handed back."""
    try:
        checked = look(path, **wishes)
    except Unreadable as error:
        return str(error)
    return checked.unreadable


def counted(checked: Checked) -> list[str]:
    """The findings that change the exit status, as text."""
    return [str(f) for f in checked.findings if f.severity is not Severity.NOTE]


def only(checked: Checked, what: str, place: str | None = None) -> Finding:
    """The one finding of a kind; fails with all of them where there is none or more than one."""
    found = [f for f in checked.findings if f.what == what and place in (None, f.place)]
    assert len(found) == 1, [str(f) for f in checked.findings]
    return found[0]


def absent(checked: Checked, what: str) -> None:
    assert what not in {f.what for f in checked.findings}, [str(f) for f in checked.findings]


def save(path: Path, array: Any) -> Path:
    np.save(path, array)
    return path


def digits(rows: int = 600) -> np.ndarray:
    """Pictures like MNIST: a stroke in the middle, a border that is always 0."""
    pictures = np.zeros((rows, 28, 28), np.uint8)
    pictures[:, 6:22, 6:22] = rng(1).integers(0, 256, (rows, 16, 16)) * (rng(2).random((rows, 16, 16)) < 0.3)
    return pictures


def padded_tokens(rows: int = 500, width: int = 64, seed: int = 3) -> np.ndarray:
    """Token ids that begin with the same token and are padded with 0."""
    ids = rng(seed).integers(5, 30000, (rows, width))
    ids[:, 0] = 101
    for i, length in enumerate(rng(seed + 1).integers(4, width, rows)):
        ids[i, length] = 102
        ids[i, length + 1 :] = 0
    return ids


def write_csv(path: Path, rows: list[list[Any]], encoding: str = "utf-8", **dialect: Any) -> Path:
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file, **dialect).writerows(rows)
    return path


def people(rows: int = 200) -> list[list[Any]]:
    """A table of people with a header, as a spreadsheet gives it."""
    draw = rng(5)
    body = [
        [i, f"name, {i}", round(draw.normal(170, 10), 2), int(draw.integers(18, 90)), ["a", "b", "c"][i % 3], int(draw.integers(0, 2))] for i in range(rows)
    ]
    return [["id", "name", "height", "age", "group", "label"], *body]


def iris() -> list[list[Any]]:
    """Measurements rounded to one decimal, of which a few rows are bound to be equal."""
    draw = rng(6)
    return [["sepal_length", "sepal_width", "class"], *[[round(draw.normal(5, 0.8), 1), round(draw.normal(3, 0.4), 1), i // 50] for i in range(150)]]


def arrow_table(columns: dict[str, Any]) -> Any:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    return pyarrow.table(columns)


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    parquet.write_table(arrow_table(columns), path, **options)
    return path


def write_arrow(path: Path, columns: dict[str, Any], stream: bool = False) -> Path:
    ipc = pytest.importorskip("pyarrow.ipc", reason="pyarrow is not installed")
    table = arrow_table(columns)
    with (ipc.new_stream if stream else ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=64)
    return path


def write_images(folder: Path, draw: Callable[[int], np.ndarray], number: int = 12, suffix: str = "png", mode: str | None = None) -> Path:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for i in range(number):
        target = folder / f"class{i % 3}"
        target.mkdir(parents=True, exist_ok=True)
        picture = image.fromarray(draw(i))
        (picture.convert(mode) if mode else picture).save(target / f"{i:03}.{suffix}")
    return folder


def noise(seed: int) -> np.ndarray:
    return rng(seed).integers(0, 256, (16, 20, 3), dtype=np.uint8)
