"""Columns whose value never changes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from whynan.forensics.data.tables import Column, Piece, Sort

if TYPE_CHECKING:
    from whynan.forensics.data.tables import Array


class Constancy:
    """Which features of a column have had one value in all rows.

    Cost: one comparison per value until a feature changes; then none.
    """

    def __init__(self, column: Column) -> None:
        self._column = column
        self.value: Array | None = None  # the first row
        self.left: Array | None = None  # features that are still the same
        self.text = b""
        self.all_same = True  # of at least one feature

    @property
    def whole(self) -> bool:
        """Whether every row is the same."""
        return self.all_same and (self.left is None or self.value is None or len(self.left) == len(self.value))

    def add(self, piece: Piece) -> None:
        """Compare the next rows with the first one."""
        if not self.all_same or not piece.rows:
            return
        if piece.lengths is None:
            self._add_dense(piece)
        else:
            self._add_ragged(piece)

    def _add_dense(self, piece: Piece) -> None:
        import numpy as np

        values = piece.values if piece.missing is None else piece.values[~piece.missing]
        if not len(values):
            return
        if self.value is None or self.left is None:
            self.value, self.left = values[0].copy(), np.arange(values.shape[1])
        for part in (values[:32], values[32:]):
            if len(self.left) and len(part):
                chosen = part if len(self.left) == part.shape[1] else part[:, self.left]
                self.left = self.left[(chosen == self.value[self.left]).all(axis=0)]
        self.all_same = bool(len(self.left))

    def _add_ragged(self, piece: Piece) -> None:
        """Text and lists: is every row the same? Once two differ, nothing more is asked."""
        import numpy as np

        assert piece.lengths is not None
        given = piece.lengths > 0
        if not given.any():
            return
        first = int(np.flatnonzero(given)[0])
        start = int(piece.lengths[:first].sum())
        if self.value is None:
            self.value = piece.values[start : start + piece.lengths[first]].copy()
            self.text = self.value.tobytes()[:80] if self._column.sort is Sort.TEXT else b""
        size = len(self.value)
        if (piece.lengths[given] != size).any():
            self.all_same = False
        else:
            self.all_same = bool((piece.values.reshape(-1, size) == self.value).all())
