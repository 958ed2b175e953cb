"""Rows that are equal: duplicates anywhere in a table, and batches made of one row again and again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whynan.forensics.data.keys import row_bytes
from whynan.forensics.data.marks import FIRST, Marks
from whynan.forensics.data.tables import Block, Table

if TYPE_CHECKING:
    from whynan.forensics.data.tables import Array

_MOST = 4_000_000  # keys that are held: 64 MB with their row numbers


@dataclass(slots=True)
class Duplicates:
    """What is known of rows that repeat an earlier one."""

    count: int = 0
    rows: list[int] = field(default_factory=list)  # the first few repeats
    originals: list[int] = field(default_factory=list)  # and the rows they repeat
    share: float = 1.0  # of all rows that could be remembered
    largest: int = 0  # rows in the largest group of equal ones


class KeyStore:
    """The keys of all rows, or of a share of them chosen by the key itself: equal rows are kept or dropped together."""

    def __init__(self) -> None:
        self._keys: list[Array] = []
        self._rows: list[Array] = []
        self._held = 0
        self.thinned = 0  # one key in 2**thinned is kept

    @property
    def share(self) -> float:
        return 0.5**self.thinned

    def add(self, keys: Array, start: int) -> None:
        import numpy as np

        rows = np.arange(start, start + len(keys), dtype=np.int64)
        keep = self._kept(keys)
        self._keys.append(keys[keep])
        self._rows.append(rows[keep])
        self._held += len(self._keys[-1])
        while self._held > _MOST:
            self._thin()

    def _kept(self, keys: Array) -> Array:
        import numpy as np

        return np.asarray(((keys >> np.uint64(40)) & np.uint64((1 << self.thinned) - 1)) == 0)

    def _thin(self) -> None:
        self.thinned += 1
        chosen = [self._kept(k) for k in self._keys]
        self._keys = [k[c] for k, c in zip(self._keys, chosen, strict=True)]
        self._rows = [r[c] for r, c in zip(self._rows, chosen, strict=True)]
        self._held = sum(map(len, self._keys))

    def repeated(self) -> Array:
        """Return, in ascending order, the rows whose key another row has too."""
        import numpy as np

        if not self._keys:
            return np.zeros(0, np.int64)
        keys, rows = np.concatenate(self._keys), np.concatenate(self._rows)
        ordered = np.sort(keys)
        twice = ordered[1:][ordered[1:] == ordered[:-1]]
        return np.asarray(rows[np.isin(keys, twice)] if len(twice) else rows[:0])


def find_duplicates(table: Table, store: KeyStore, which: tuple[int, ...], telling: frozenset[int]) -> Duplicates:
    """Read the rows with equal keys again and say which are equal in every byte; rows that are blank in a telling column are left out.

    Cost: a second reading of the file where keys were equal; none otherwise.
    """
    candidates = store.repeated()
    found = Duplicates(share=store.share)
    if not len(candidates):
        return found
    firsts: dict[int, int] = {}  # hash of all bytes: first row
    sizes: dict[int, int] = {}
    contents: dict[int, bytes] = {}  # of the rows that are named
    for row, content in _contents(table, candidates, which, telling):
        key = hash(content)
        if key not in firsts:
            firsts[key] = row
            if len(contents) < 4 * FIRST:
                contents[key] = content
        elif key not in contents or contents[key] == content:
            sizes[key] = sizes.get(key, 1) + 1
            found.count += 1
            if len(found.rows) < FIRST and key in contents:
                found.rows.append(row)
                found.originals.append(firsts[key])
    found.largest = max(sizes.values(), default=0)
    found.count = round(found.count / found.share)
    return found


def _contents(table: Table, rows: Array, which: tuple[int, ...], telling: frozenset[int]) -> Iterator[tuple[int, bytes]]:
    import numpy as np

    start = 0
    for block in table.blocks():
        low, high = np.searchsorted(rows, (start, start + block.rows))
        local = rows[low:high] - start
        for row, content in zip(local.tolist(), _joined(block, local, which, telling), strict=True):
            if content:
                yield start + row, content
        start += block.rows
        if high == len(rows):
            return


def _joined(block: Block, rows: Array, which: tuple[int, ...], telling: frozenset[int]) -> list[bytes]:
    """All bytes of some rows; nothing for a row that is blank."""
    parts = [row_bytes(block.pieces[n], rows) for n in which]
    told = [i for i, n in enumerate(which) if n in telling]
    return [b"\x00".join(row) if all(row[i].strip(b"\x00") for i in told) else b"" for row in zip(*parts, strict=True)]


class ConstantBatches:
    """Batches in which every row is the same, in the order of the file."""

    def __init__(self, batch: int, which: tuple[int, ...]) -> None:
        self.marks = Marks(batch)
        self._which = which
        self._last: tuple[int, bytes] | None = None  # key and bytes of the row before this block

    def add(self, block: Block, keys: Array, start: int) -> None:
        """Mark every row that equals the one before it, or begins a batch."""
        import numpy as np

        same = np.zeros(len(keys), bool)
        same[1:] = keys[1:] == keys[:-1]
        if self._last is not None and len(keys) and self._last[0] == int(keys[0]):
            same[0] = self._whole(block, np.zeros(1, np.int64))[0] == self._last[1]
        self._confirm(block, same)
        if len(keys):
            self._last = int(keys[-1]), self._whole(block, np.array([len(keys) - 1]))[0]
        rows = np.arange(start, start + len(keys))
        self.marks.add(rows[same | (rows % self.marks.batch == 0)])

    def _confirm(self, block: Block, same: Array) -> None:
        import numpy as np

        rows = np.flatnonzero(same[1:]) + 1
        for chunk in np.array_split(rows, -(-len(rows) // 1024)) if len(rows) else ():
            same[chunk] = [a == b for a, b in zip(self._whole(block, chunk), self._whole(block, chunk - 1), strict=True)]

    def _whole(self, block: Block, rows: Array) -> list[bytes]:
        parts = [row_bytes(block.pieces[n], rows) for n in self._which]
        return [b"\x00".join(row) for row in zip(*parts, strict=True)]
