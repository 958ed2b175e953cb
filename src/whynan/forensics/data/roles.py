"""What a column is for, as far as its name and its values' type tell."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from fnmatch import fnmatchcase

from whynan.forensics.data.tables import Column, Sort


class Role(StrEnum):
    """What a column is for."""

    INPUT = "input"
    LABEL = "label"
    TOKENS = "tokens"  # ids that index a table, in a row
    KEY = "key"  # an id of something, one a row: user_id
    MASK = "mask"  # 1 where a token counts
    NUMBERING = "numbering"  # the row's own number or name: says nothing about the row


_LABEL = {"label", "labels", "target", "targets", "tgt", "y", "class", "classes", "lbl", "gt", "answer", "score"}
_TOKENS = {"ids", "tokens", "token"}
_NUMBERING = {
    "id",
    "idx",
    "index",
    "uuid",
    "guid",
    "unnamed: 0",
    "__index_level_0__",
    "__index__",
    "row",
    "row_id",
    "sample_id",
    "example_id",
    "file",
    "filename",
    "path",
}


_WEIGHT = re.compile(r"[./](weight|bias|kernel|scale|gamma|beta|(running_|moving_)(mean|var|variance))$")


def role_of(column: Column) -> Role:
    """Say what a column is for.

    >>> [role_of(Column(n, "int64", Sort.INTEGER)).value for n in ("y_train", "input_ids", "attention_mask", "user_id", "idx", "height")]
    ['label', 'tokens', 'mask', 'key', 'numbering', 'input']
    """
    name = column.name.lower().rsplit(".", 1)[-1].strip()
    parts = re.split(r"[^a-z0-9]+", name)
    words = set(parts)
    if (name in _NUMBERING and column.scalar) or (not name and column.named and column.scalar):
        return Role.NUMBERING
    if words & _LABEL:
        return Role.LABEL
    if "mask" in words and words & {"attention", "input"}:
        return Role.MASK
    if words & _TOKENS and column.numeric and (not column.scalar or (column.sort is Sort.INTEGER and parts[-1] in _TOKENS)):
        return Role.TOKENS
    return Role.KEY if "id" in words and column.scalar and column.sort is Sort.INTEGER else Role.INPUT


def is_weight(column: Column) -> bool:
    """Whether an array is a part of a model that was saved with numpy: a bias that is all zero is nothing strange.

    >>> [is_weight(Column(n, "float32", Sort.FLOAT)) for n in ("layer1.bias", "params/Dense_0/kernel", "weight")]
    [True, True, False]
    """
    return _WEIGHT.search(column.name) is not None


def wished_range(column: Column, ranges: Mapping[str, tuple[float, float]]) -> tuple[float, float] | None:
    """Return the range the user gave for a column: by its name, by a pattern, or in other letters' case."""
    return next((bounds for wish, bounds in ranges.items() if _means(wish, column.name)), None)


def unmet(ranges: Iterable[str], columns: Iterable[Column]) -> list[str]:
    """Return the ranges that belong to no column."""
    names = [c.name for c in columns]
    return [wish for wish in ranges if not any(_means(wish, n) for n in names)]


def _means(wish: str, name: str) -> bool:
    return fnmatchcase(name.lower(), wish.lower()) or name.lower().rsplit(".", 1)[-1] == wish.lower()
