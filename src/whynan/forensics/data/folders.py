"""Folders of data files: shards of one table, and arrays that belong together."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from whynan.forensics.addresses import Place, Unreadable
from whynan.forensics.data.arrays import npy_source
from whynan.forensics.data.sources import Source, are_samples, as_rows, joined, tables_of
from whynan.forensics.data.tables import Table, Trouble, chained

_SUFFIXES = frozenset({".npy", ".npz", ".parquet", ".arrow", ".csv", ".tsv"})
_MOST = 100_000

FormOf = Callable[[Place], str | None]
Opened = TypeVar("Opened", Source, Table)


def data_files(place: Place, form_of: FormOf) -> list[Place]:
    """Return the data files of a folder and of the folders in it, sorted by name."""
    return [p for p in _files(place) if form_of(p) is not None][:_MOST]


def _files(place: Place, deeper: bool = True) -> Iterator[Place]:
    for child in place.children():
        if child.name.startswith("."):
            continue
        if child.suffix in _SUFFIXES:
            yield child
        elif deeper and child.is_dir() and (child.remote or not os.path.islink(child.address)):
            yield from _files(child, deeper=False)


def read_folder(place: Place, form_of: FormOf, readers: dict[str, Callable[[Place], list[Table]]]) -> list[Table]:
    """Open every data file: those whose names differ by a number only are shards, arrays with as many rows belong together."""
    broken: list[str] = []
    arrays: list[Source] = []
    tables: list[Table] = []
    for name, group in _groups(place, data_files(place, form_of)).items():
        if group[0].suffix == ".npy":
            sources = [s for p in group for s in _opened(p, lambda p: [npy_source(p)], broken)]
            if are_samples(sources) and len({s.kind for s in sources}) > 1:
                tables.append(as_rows(name, sources))
            else:
                arrays += _shards(name, sources)
        else:
            tables += _parts(name, [_labelled(t, p) for p in group for t in _opened(p, lambda p: readers[form_of(p) or ""](p), broken)])
    tables = (tables_of(arrays) if arrays else []) + tables
    if not tables:
        raise Unreadable(broken[0] if broken else "no data file in it")
    tables[0].troubles.extend(Trouble("unreadable-file", why, "", count=1) for why in broken[:20])
    return tables


def _opened(place: Place, read: Callable[[Place], list[Opened]], broken: list[str]) -> list[Opened]:
    try:
        return read(place)
    except Unreadable as why:
        broken.append(f"{place.name}: {why}")
        return []


def _labelled(table: Table, place: Place) -> Table:
    """Say of what is found in lines of a file which file it is."""
    for trouble in table.troubles:
        trouble.message += f" in {place.name}"
    return table


def _shards(name: str, sources: list[Source]) -> list[Source]:
    """Join arrays whose rows are alike; others stay what they are."""
    if len(sources) > 1 and len({s.kind for s in sources}) == 1:
        return [joined(name, sources)]
    return sources


def _parts(name: str, tables: list[Table]) -> list[Table]:
    if len(tables) > 1 and all(t.signature is not None and t.signature == tables[0].signature for t in tables):
        return [chained(name, tables)]
    return [replace(t, name=t.name or name) for t in tables]


def _groups(place: Place, files: list[Place]) -> dict[str, list[Place]]:
    groups: dict[str, list[Place]] = {}
    for file in files:
        name = file.address.removeprefix(place.address).strip("/").rsplit(".", 1)[0]
        groups.setdefault(re.sub(r"\d+", "#", name) + file.suffix, []).append(file)
    return {re.sub(r"[-_.]*(#[-_.]?(of)?[-_.]?)+$", "", n.removesuffix(g[0].suffix)) or n: sorted(g, key=_natural) for n, g in groups.items()}


def _natural(place: Place) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", place.name)]
