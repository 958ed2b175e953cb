"""The net under every reader: what nobody foresaw ends one path, not the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from whynan.errors import UsageError
from whynan.forensics.addresses import NotLookedAt, Unreadable

INTERNAL = "internal error"


@contextmanager
def net() -> Iterator[None]:
    """Turn any exception that no reader foresaw into `Unreadable`, which says that it is a fault of ours.

    >>> with net():
    ...     {}["shape"]
    Traceback (most recent call last):
    whynan.forensics.addresses.NotLookedAt: internal error: KeyError: 'shape'; please report it
    """
    try:
        yield
    except (Unreadable, UsageError):
        raise
    except Exception as error:
        said = str(error).strip().splitlines()
        what = ": ".join([type(error).__name__, *(line[:120] for line in said[:1])])
        raise NotLookedAt(f"{INTERNAL}: {what}; please report it") from error
